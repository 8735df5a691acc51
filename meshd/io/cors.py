"""Cross-origin requests: what web pages of other origins may do (Fetch standard §3.2). Pure.

    OPTIONS with origin and access-control-request-method, of a listed origin → 204, methods of the path
    any other request of a listed origin                                      → its answer, open to pages
    anything else                                                             → as if there were no CORS

Without listed origins nothing here does anything. Credentials (cookies) are never allowed: API keys travel in
`authorization`, which a page must have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from meshd.io.http1 import TOKEN_BYTE, Field, RequestHead, ResponseHead

MAX_AGE_SECS: Final = 600
_PREFIX: Final = b"access-control-"
_TOKEN: Final = TOKEN_BYTE + rb"+"
_TOKENS: Final = re.compile(rb"(?:" + _TOKEN + rb"(?:[ \t]*,[ \t]*" + _TOKEN + rb")*)?")
_EXPOSED: Final = (b"access-control-expose-headers", b"x-request-id, x-mesh-error-code")
_VARY: Final = (b"vary", b"origin")  # caches must not hand one origin's answer to another


class Cors:
    """The rules of one process. ``origins`` are as browsers write them; ``*`` lists every origin."""

    __slots__ = ("_lists_all", "_origins")

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)
        self._lists_all = b"*" in self._origins

    def __repr__(self) -> str:
        return f"Cors({sorted(self._origins)})"

    def preflight_answer(
        self, head: RequestHead, methods: tuple[str, ...], *, request_id: str, date: bytes, closes: bool
    ) -> bytes | None:
        """Return the whole answer to a preflight, None if ``head`` is none of a listed origin.

        ``methods``: those of the path; empty where it takes any, then the asked one is allowed.
        """
        asked = head.values.get(b"access-control-request-method")
        origin = self._origin_of(head)
        if head.method != "OPTIONS" or origin is None or not asked or not _TOKENS.fullmatch(asked):
            return None
        names = head.values.get(b"access-control-request-headers", b"")
        fields: list[Field] = [
            (b"date", date),
            (b"server", b"meshd"),
            (b"x-request-id", request_id.encode("latin-1")),
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", ", ".join(methods).encode("ascii") or asked),
            (b"access-control-max-age", b"%d" % MAX_AGE_SECS),
            _VARY,
        ]
        if names and _TOKENS.fullmatch(names):
            fields.insert(-2, (b"access-control-allow-headers", names))
        if closes:
            fields.append((b"connection", b"close"))
        # A 204 has no content-length (RFC 9110 §8.6).
        return b"HTTP/1.1 204 No Content\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % field for field in fields)

    def response_fields(self, head: RequestHead) -> tuple[Field, ...]:
        """Return what the answer to ``head`` carries in addition."""
        origin = self._origin_of(head)
        if origin is None:
            return ()
        return ((b"access-control-allow-origin", origin), _EXPOSED, _VARY)

    def relayed(self, head: RequestHead, response: ResponseHead) -> ResponseHead:
        """Return the response without the upstream's own rules, where ours take their place."""
        if self._origin_of(head) is None:
            return response
        stripped: ResponseHead | None = response.derived.get("without access-control")
        if stripped is None or stripped.content_length != response.content_length:
            stripped = _without_rules(response)
            response.derived["without access-control"] = stripped
        return stripped

    def _origin_of(self, head: RequestHead) -> bytes | None:
        """Return the origin of a request if it is listed; a request with two has none."""
        if not self._origins:
            return None
        origin = head.values.get(b"origin")
        if not origin or b"origin" in head.repeated:
            return None
        return origin if self._lists_all or origin in self._origins else None


def _without_rules(response: ResponseHead) -> ResponseHead:
    fields = tuple(field for field in response.fields if not field[0].lower().startswith(_PREFIX))
    if len(fields) == len(response.fields):
        return response
    values = {name: value for name, value in response.values.items() if not name.startswith(_PREFIX)}
    return response.with_fields(fields, values)
