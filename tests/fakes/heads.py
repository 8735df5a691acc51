"""What a head says: for tests that compare two of them."""

from __future__ import annotations

from typing import Any

from meshd.io.heads import RequestHead, ResponseHead

_BOTH = ("is_http11", "fields", "values", "content_length", "is_chunked", "has_body", "keeps_alive")
_REQUEST = ("method", "target", "path", "query", "repeated")
_RESPONSE = ("status", "reason", "is_close_delimited", "is_sse", "is_encoded")


def facts(head: RequestHead | ResponseHead | None) -> dict[str, Any]:
    """Everything but where a head was read from, and what was worked out from it."""
    if head is None:
        return {}
    names = (*_BOTH, "connection_tokens", *(_REQUEST if isinstance(head, RequestHead) else _RESPONSE))
    return {name: getattr(head, name) for name in names}
