"""The benchmark: meshd, its baseline and two floors, each on one core (docs/performance.md)."""


class BenchError(Exception):
    """The benchmark cannot go on; the text says what to do."""
