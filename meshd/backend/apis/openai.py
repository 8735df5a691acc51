"""What the OpenAI chat and completions answers have in common."""

from __future__ import annotations

from typing import Any, Final

CREATED: Final = 1_700_000_000
FINGERPRINT: Final = "meshd-backend-1"


def envelope(identifier: str, kind: str, model: str) -> dict[str, Any]:
    """Return the leading members of every answer and chunk; the caller adds choices and usage."""
    return {
        "id": identifier,
        "object": kind,
        "created": CREATED,
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def finish_reason(is_cut: bool) -> str:
    return "length" if is_cut else "stop"
