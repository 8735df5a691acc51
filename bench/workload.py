"""What is asked of a front end: requests of one size, long ones among short ones, or streams."""

from __future__ import annotations

from dataclasses import dataclass

from bench.load import Sending


@dataclass(frozen=True, slots=True)
class Workload:
    """``streams`` 0: requests of ``body_bytes``, and of ``long_bytes`` by ``long_clients`` more clients.
    Otherwise streams of ``events_per_s`` each."""

    clients: int
    seconds: float
    body_bytes: int = 1024
    is_distinct: bool = True
    streams: int = 0
    events_per_s: int = 100
    events_per_stream: int = 1000
    long_clients: int = 0
    long_bytes: int = 0

    @property
    def label(self) -> str:
        if self.streams:
            return f"{self.streams} streams × {self.events_per_s} events/s"
        text = f"{shown_size(self.body_bytes)} × {self.clients} clients"
        if self.long_clients:
            text += f" + {shown_size(self.long_bytes)} × {self.long_clients}"
        return text

    @property
    def sendings(self) -> tuple[Sending, ...]:
        """The load generators it takes, the one whose latencies count first."""
        short = Sending(self.clients, self.body_bytes, self.is_distinct)
        if not self.long_clients:
            return (short,)
        return short, Sending(self.long_clients, self.long_bytes, self.is_distinct)


def shown_size(size: int) -> str:
    """``1 KiB``, ``16 KiB``, ``1 MiB``, or bytes."""
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1024 else f"{size} B"
