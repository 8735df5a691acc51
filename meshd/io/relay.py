"""Move one response from an upstream to the client, under back-pressure both ways.

The relay is the sink of an upstream connection. It writes the head, passes the body on as it arrives,
and ends the client's framing. It decides nothing: a broken upstream is handled by the failure contract
that an answer cut short is never to look whole, which is all in `_fail`.

    length    the upstream declared Content-Length: bytes pass, a cut shows as a short body
    chunked   HTTP/1.1 client, length unknown
    close     HTTP/1.0 client, length unknown: the end of the connection is the end
    none      no body (HEAD, 204, 304)
"""

from __future__ import annotations

from typing import Final

from meshd.api.dialects import StreamDialect, error_event
from meshd.io.chunked import ChunkedDecoder
from meshd.io.downstream import DownstreamConnection
from meshd.io.sse import SseRelay
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from meshd.strand import Promise

MAX_OBSERVED_BODY_BYTES: Final = 1 << 20

_MESSAGES: Final = {
    "upstream_connection_failed": "The upstream closed the connection before the response was complete.",
    "upstream_timeout": "The upstream sent nothing for too long.",
    "upstream_protocol_error": "The upstream ended the response without completing it.",
    "admission_closed": "The server is shutting down.",
}


class Relay:
    """One response on its way to one client; `begin` promises its outcome, when nothing more will come.

    Outcomes: `completed`, `backend_error` (the upstream's own error event), `body_error`. ``is_cut``
    says that the client's connection was or must be closed to show a truncation.

    ``event_dialect``: how a broken SSE stream is told to the client; None: it is aborted. ``must_end``:
    a clean end without the API's own end of stream is a failure too (`/generate` knows no such rule).
    """

    __slots__ = (
        "_body",
        "_done",
        "_downstream",
        "_event_dialect",
        "_framing",
        "_head",
        "_must_end",
        "_observes_events",
        "_sse",
        "_upstream",
        "bytes_out",
        "ended_at",
        "failure",
        "first_token_at",
        "is_cut",
        "observes_body",
        "outcome",
        "skipped_observation",
        "usage",
        "usage_body",
    )

    def __init__(
        self,
        downstream: DownstreamConnection,
        upstream: UpstreamConnection,
        *,
        framing: str,
        event_dialect: StreamDialect | None,
        sse: SseRelay | None,
        observes_body: bool,
        must_end: bool = True,
    ) -> None:
        self._downstream = downstream
        self._upstream = upstream
        self._framing = framing
        self._event_dialect = event_dialect
        self._must_end = must_end
        self._observes_events = sse is not None and sse.is_observing
        self._sse = sse
        self._done: Promise[str] | None = None
        self._head = b""  # not written yet: it goes out with the first bytes of the body
        self._body: list[bytes] = []  # observed so far
        self.observes_body = observes_body
        self.bytes_out = 0
        self.outcome = ""
        self.is_cut = False
        self.failure: UpstreamFailure | None = None
        self.first_token_at = 0.0
        self.ended_at = 0.0  # the API's own end of stream, or the last byte
        self.usage = sse.usage if sse is not None else None
        self.usage_body = b""  # a whole plain body, kept for whoever counts its usage
        self.skipped_observation = ""

    def __repr__(self) -> str:
        return (
            f"Relay({self._framing} out={self.bytes_out} outcome={self.outcome or 'running'} {self._sse!r})"
        )

    def begin(self, head: bytes) -> Promise[str] | None:
        """Write ``head`` and what came with it; None if that was the whole response, which has ended then."""
        self._head = head
        upstream = self._upstream
        arrived = upstream.attach(self)
        if arrived:
            self.body_data(arrived)
        if upstream.failure is not None:
            self.body_failed(upstream.failure)
        elif upstream.is_complete:
            self.body_end()
        if self._head:
            self._write(b"")
        if self.outcome:
            return None
        # What came before may have filled the client's buffer, or an earlier answer still does.
        if self._downstream.is_write_paused:
            self.pause()
        else:
            self.resume()
        done = self._done = Promise[str]()
        return done

    def pause(self) -> None:
        """The client reads too slowly: stop reading its upstream."""
        self._upstream.pause_reading()

    def resume(self) -> None:
        self._upstream.resume_reading()

    # ------------------------------------------------------------------------- what the upstream calls

    def pass_chunks(self, data: bytes, decoder: ChunkedDecoder) -> bool:
        """Relay whole events in their own chunks as they stand: half of the cost of taking them apart."""
        sse = self._sse
        if sse is None or self._framing != "chunked" or self._head or not sse.may_pass(data):
            return False
        payload_bytes = decoder.pass_events(data)
        if not payload_bytes:
            return False
        sse.passed(data)
        self.bytes_out += payload_bytes
        self._downstream.write(data)
        return True

    def body_data(self, data: bytes) -> None:
        sse = self._sse
        if sse is not None:
            had_token = sse.has_first_token
            data = sse.feed(data)
            if sse.has_first_token and not had_token:
                self.first_token_at = self._upstream.last_byte_at
            if sse.has_ended and not self.ended_at:
                self.ended_at = self._upstream.last_byte_at
            if not data:
                return
        elif self.observes_body:
            self._observe(data)
        self._send(data)

    def body_end(self) -> None:
        sse = self._sse
        if sse is not None:
            rest = sse.finish()
            if self._needs_end(sse) and not sse.has_ended:
                self._fail(UpstreamFailure("upstream_protocol_error", "no end of stream", True, True))
                return
            self._send(rest)
        elif self._body:
            self.usage_body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        if self._framing == "chunked":
            self._write(b"0\r\n\r\n")
        self._end("backend_error" if sse is not None and sse.has_error_event else "completed")

    def _needs_end(self, sse: SseRelay) -> bool:
        return (
            self._must_end
            and sse.is_observing
            and self._event_dialect is not None
            and self._framing in ("chunked", "close")
        )

    def body_failed(self, failure: UpstreamFailure) -> None:
        sse = self._sse
        if sse is not None and sse.is_success and self._framing in ("chunked", "close"):
            # A cut after the API's own success marker is a normal end.
            self._send(sse.finish())
            if self._framing == "chunked":
                self._write(b"0\r\n\r\n")
            self._end("completed")
            return
        self._fail(failure)

    # ----------------------------------------------------------------------------------------- inside

    def _send(self, data: bytes) -> None:
        if not data:
            return
        self.bytes_out += len(data)
        if self._framing == "chunked":
            self._write(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._framing != "none":
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self._head:
            data = self._head + data
            self._head = b""
        self._downstream.write(data)

    def _fail(self, failure: UpstreamFailure) -> None:
        """Show the client a broken response, in the words of its API where it can still be told."""
        self.failure = failure
        sse = self._sse
        can_tell = (
            sse is not None
            and self._event_dialect is not None
            and sse.is_observing
            and not sse.has_sent_partial
            and self._framing in ("chunked", "close")
        )
        self.is_cut = True
        if can_tell and sse is not None and not sse.has_error_event:
            assert self._event_dialect is not None
            event = error_event(
                self._event_dialect,
                failure.code,
                _MESSAGES.get(failure.code, _MESSAGES["upstream_connection_failed"]),
                sse.last_sequence_number + 1,
            )
            self._send(event)
        if can_tell and self._framing == "chunked":
            self._write(b"0\r\n\r\n")
        elif not can_tell:
            if self._head:
                self._write(b"")
            # Where the end of the connection is the end of the body, only a reset shows the truncation.
            self._downstream.abort(resets=self._framing == "close")
        self._end("backend_error" if sse is not None and sse.has_error_event else "body_error")

    def _end(self, outcome: str) -> None:
        if self.outcome:
            return
        self.outcome = outcome
        if self._observes_events and self._sse is not None and not self._sse.is_observing:
            self.skipped_observation = "event_too_large"
        self.ended_at = self.ended_at or self._upstream.last_byte_at
        if self._done is not None:
            self._done.set_result(outcome)

    def _observe(self, data: bytes) -> None:
        self._body.append(data)
        if self.bytes_out + len(data) > MAX_OBSERVED_BODY_BYTES:
            self.observes_body = False
            self.skipped_observation = "body_too_large"
            self._body.clear()
