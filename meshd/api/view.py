"""What routing may know of a body: the routing view, made once by a prepare worker and never changed."""

from __future__ import annotations

from typing import Any, Final

NEEDS_TEXT: Final = 1
NEEDS_TOKENS: Final = 2
NEEDS_RANK_FREE: Final = 4
"""What a prepare job must produce beside the parse: the ``needs`` bits of a job descriptor."""
NEEDS_SESSION: Final = 8
"""What a policy reads of the request's head; no prepare job is asked for it."""

UNKNOWN_ASSIGNMENT: Final = -1
NO_ASSIGNMENT: Final = -2
"""Values of ``RoutingView.assigned``: nobody asked the controller yet; it gave no answer."""


class RoutingView:
    """The facts of one body that placement uses.

    ``model``: empty if the body names none. ``batch_size``: at most 2³²−1. ``token_ids``: the first ids
    of the prompt packed as u32 little-endian, empty when not asked for or when the prompt is empty.
    ``prefix_key``: xxh3_64 of ``token_ids``, 0 without them; ``key_position``: its place on the hash
    ring, 0 without them. An I/O process gets that alone. ``text_bytes``: UTF-8 length of the routing
    text up to 524288, 0 when text was not asked for.
    ``block_keys``: its keys in the prefix index, packed u64 (block_keys.py).
    ``rank_free``: the body without its ``data_parallel_rank``, see ``rank_body``; ``None`` if not asked for.
    ``session_key`` and ``assigned`` do not come from the body: the first ``x-session-id``, and the number
    of the upstream that the controller assigned to a new session. An I/O process sets them on a view of
    ``for_session`` only: others share the view that it got.

    Written out, since the methods that ``dataclass`` makes stay interpreted in a compiled build.
    """

    __slots__ = (
        "assigned",
        "batch_size",
        "block_keys",
        "creates_state",
        "has_state",
        "key_position",
        "model",
        "prefix_key",
        "rank_free",
        "session_key",
        "text_bytes",
        "token_ids",
        "wants_logprobs",
        "wants_stream",
    )

    def __init__(
        self,
        model: str,
        wants_stream: bool = False,
        batch_size: int = 1,
        wants_logprobs: bool = False,
        has_state: bool = False,
        creates_state: bool = False,
        token_ids: bytes = b"",
        prefix_key: int = 0,
        key_position: int = 0,
        text_bytes: int = 0,
        rank_free: tuple[int, ...] | None = None,
        block_keys: bytes = b"",
        session_key: bytes = b"",
        assigned: int = UNKNOWN_ASSIGNMENT,
    ) -> None:
        self.model = model
        self.wants_stream = wants_stream
        self.batch_size = batch_size
        self.wants_logprobs = wants_logprobs
        self.has_state = has_state
        self.creates_state = creates_state
        self.token_ids = token_ids
        self.prefix_key = prefix_key
        self.key_position = key_position
        self.text_bytes = text_bytes
        self.rank_free = rank_free
        self.block_keys = block_keys
        self.session_key = session_key
        self.assigned = assigned

    @property
    def is_asked(self) -> bool:
        """Whether it holds any of what an I/O process gets because ``NEEDS`` bits asked for it."""
        return bool(self.rank_free is not None or self.block_keys or self.key_position or self.text_bytes)

    def for_session(self, session_key: bytes) -> RoutingView:
        """Return a view of its own for a request of this session, not assigned yet."""
        return RoutingView(
            self.model,
            self.wants_stream,
            self.batch_size,
            self.wants_logprobs,
            self.has_state,
            self.creates_state,
            self.token_ids,
            self.prefix_key,
            self.key_position,
            self.text_bytes,
            self.rank_free,
            self.block_keys,
            session_key,
        )

    def with_keys(self, key_position: int, text_bytes: int, block_keys: bytes) -> RoutingView:
        """Return a view of the same facts for a prompt with these keys."""
        return RoutingView(
            self.model,
            self.wants_stream,
            self.batch_size,
            self.wants_logprobs,
            self.has_state,
            self.creates_state,
            key_position=key_position,
            text_bytes=text_bytes,
            block_keys=block_keys,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutingView) and self._members() == other._members()

    def _members(self) -> tuple[Any, ...]:
        return (
            self.model,
            self.wants_stream,
            self.batch_size,
            self.wants_logprobs,
            self.has_state,
            self.creates_state,
            self.token_ids,
            self.prefix_key,
            self.key_position,
            self.text_bytes,
            self.rank_free,
            self.block_keys,
            self.session_key,
            self.assigned,
        )

    def __repr__(self) -> str:
        return f"RoutingView{self._members()!r}"
