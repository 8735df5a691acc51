"""The log of a process; ``line`` makes the lines, ``target`` writes them."""

from meshd.log.log import Log

__all__ = ["Log"]
