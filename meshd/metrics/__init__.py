"""Counters in shared cells, and their Prometheus text."""
