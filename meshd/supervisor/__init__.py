"""The supervisor: starts every other process, watches and replaces it, and ends the node in order.

Reading order: process (the loop), node (what is started), children (how), shutdown, backoff, orphans; then
listeners, segments, signals, notify. ``ps`` is the command ``meshd ps``.
"""

from meshd.supervisor.process import run

__all__ = ["run"]
