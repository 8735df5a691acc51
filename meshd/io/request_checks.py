"""Checks on a request head for an endpoint, before any body byte is stored. Pure."""

from __future__ import annotations

import re
from typing import Final

from meshd.api.endpoints import Endpoint
from meshd.errors import MeshError
from meshd.io.http1 import TOKEN_BYTE, RequestHead

_JSON_TYPE: Final = re.compile(rb"application/(?:" + TOKEN_BYTE + rb"+\+)?json[ \t]*(?:;.*)?", re.IGNORECASE)


def content_length_of(head: RequestHead) -> int | None:
    """Return the length of the body; None for a chunked one, whose length only its end will tell."""
    return None if head.is_chunked else head.content_length or 0


def check_endpoint_head(endpoint: Endpoint, head: RequestHead, max_body_bytes: int) -> None:
    """Raise MeshError for the first check that fails: encoding, type, length, expectation."""
    has_passed = head.facts.checked_for == endpoint.number  # a head like this, but for its length
    if endpoint.has_prepare_job and not has_passed:
        _check_media(head)
    check_length_and_expectation(head, max_body_bytes)
    if not has_passed:
        head.facts.checked_for = endpoint.number


def _check_media(head: RequestHead) -> None:
    encoding = head.values.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity" or b"content-encoding" in head.repeated:
        raise MeshError("unsupported_encoding", "Send the body without content-encoding.")
    media_type = head.values.get(b"content-type")
    if media_type is None or b"content-type" in head.repeated or not _JSON_TYPE.fullmatch(media_type):
        raise MeshError("unsupported_content_type", "Send the body as application/json.")


def check_length_and_expectation(head: RequestHead, max_body_bytes: int) -> None:
    """Raise MeshError for a body that is too long, or an expectation that is not served."""
    if head.content_length is not None and head.content_length > max_body_bytes:
        raise MeshError("body_too_large", f"The request body may have at most {max_body_bytes} bytes.")
    if not head.has_expectation or not head.is_http11:
        return
    if head.values[b"expect"].lower() != b"100-continue" or b"expect" in head.repeated:
        raise MeshError("expectation_failed", "The only expectation served is 100-continue.")
