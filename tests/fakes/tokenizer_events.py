"""What a tokenizer told, remembered."""

from __future__ import annotations


class RecordedEvents:
    def __init__(self) -> None:
        self.fallbacks: list[str] = []
        self.crosschecks: list[str] = []
        self.engines_off: list[str] = []
        self.offered = 0
        self.tokenized = 0

    def fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)

    def bounded(self, offered_bytes: int, tokenized_bytes: int) -> None:
        self.offered += offered_bytes
        self.tokenized += tokenized_bytes

    def crosscheck(self, result: str) -> None:
        self.crosschecks.append(result)

    def engine_off(self, source: str) -> None:
        self.engines_off.append(source)
