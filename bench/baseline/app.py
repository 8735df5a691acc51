"""A gateway in FastAPI: parse, validate, pick, forward the client's bytes, relay the answer.

Written for speed within what these libraries offer: the raw body instead of a model class, orjson, one
shared aiohttp session with unlimited kept-alive connections, no decompression, no automatic headers, and
answers of known length sent whole instead of streamed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from bench.baseline.picks import Picker

NOT_FORWARDED: Final = frozenset(
    {"host", "content-length", "connection", "keep-alive", "te", "transfer-encoding", "upgrade"}
)
NOT_RELAYED: Final = frozenset(
    {"content-length", "connection", "keep-alive", "transfer-encoding", "date", "server"}
)


def make_app(picker: Picker) -> FastAPI:
    """The application; its client session lives as long as the server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=1800, sock_connect=5)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.body()
        problem, prompt = check(body)
        if problem:
            return _error(400, "invalid_request_error", problem)
        url = picker.pick(prompt)
        return await _forward(request, picker, url, body)

    return app


def check(body: bytes) -> tuple[str, Any]:
    """(what is wrong or nothing, the prompt) of a completions body."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "the body is not JSON", None
    if not isinstance(found, dict):
        return "the body is not a JSON object", None
    if not isinstance(found.get("model", ""), str) or not isinstance(found.get("stream", False), bool):
        return "model must be a string, stream a boolean", None
    prompt = found.get("prompt")
    return (
        ("", prompt)
        if _is_prompt(prompt)
        else ("prompt must be text, texts, token ids or lists of them", None)
    )


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list):
        return False
    return (
        all(isinstance(item, str) for item in prompt)
        or _are_ids(prompt)
        or all(isinstance(item, list) and _are_ids(item) for item in prompt)
    )


def _are_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32 for item in items)


async def _forward(request: Request, picker: Picker, url: str, body: bytes) -> Response:
    session: aiohttp.ClientSession = request.app.state.session
    headers = {name: value for name, value in request.headers.items() if name not in NOT_FORWARDED}
    try:
        answer = await session.post(url + request.url.path, data=body, headers=headers)
    except (aiohttp.ClientError, TimeoutError):
        picker.release(url)
        return _error(502, "server_error", "the upstream did not answer")
    relayed = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_RELAYED}
    if answer.content_length is None:
        return StreamingResponse(_pieces(answer, picker, url), answer.status, relayed)
    try:
        return Response(await answer.read(), answer.status, relayed)
    finally:
        picker.release(url)


async def _pieces(answer: aiohttp.ClientResponse, picker: Picker, url: str) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.release()
        picker.release(url)


def _error(status: int, kind: str, message: str) -> Response:
    return Response(
        orjson.dumps({"error": {"message": message, "type": kind}}), status, media_type="application/json"
    )
