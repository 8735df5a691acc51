"""``/_backend/…``: how a test reads what arrived, and makes the upstream fail."""

from __future__ import annotations

from typing import Any, Final, Protocol

import orjson

from meshd.backend.call import invalid, read_body
from meshd.backend.faults import NUMBERS, StandingFaults, parse_faults
from meshd.backend.reply import Dialect, Reply, RequestError, error_reply, json_reply
from meshd.backend.state import Request, RequestLog, Stats

PREFIX: Final = "/_backend/"


class Controlled(Protocol):
    """What these routes act on."""

    stats: Stats
    log: RequestLog
    standing_faults: StandingFaults
    health_status: int


def answer(target: Controlled, request: Request) -> Reply:
    try:
        return json_reply(_act(target, request))
    except RequestError as error:
        return error_reply(error, Dialect.OPENAI)


def _act(target: Controlled, request: Request) -> Any:
    match request.method, request.path.removeprefix(PREFIX):
        case "GET", "requests":
            return target.log.to_list()
        case "DELETE", "requests":
            return {"cleared": target.log.clear()}
        case "GET", "stats":
            return target.stats.to_dict()
        case "PUT", "fault":
            return _set_faults(target, request.body)
        case "PUT", "health":
            return _set_health(target, request.body)
    raise RequestError(404, "not_found", "There is no such control route or method.")


def _set_faults(target: Controlled, body: bytes) -> dict[str, str]:
    spec = _spec_of(body)
    try:
        target.standing_faults.set(parse_faults(spec))
    except ValueError as error:
        raise invalid(f"{error}.") from None
    return {"fault": spec}


def _spec_of(body: bytes) -> str:
    """The body is the specification itself, or JSON: a string, or an object with the member ``fault``."""
    text = body.decode("latin-1").strip()
    if not text.startswith(("{", '"')):
        return text
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise invalid("The body is neither a specification nor JSON.") from None
    spec = value.get("fault", "") if isinstance(value, dict) else value
    if not isinstance(spec, str):
        raise invalid("Member 'fault' must be a string.")
    return spec.strip()


def _set_health(target: Controlled, body: bytes) -> dict[str, int]:
    status = read_body(body).get("status")
    low, high = NUMBERS["status"]
    if type(status) is not int or not low <= status <= high:
        raise invalid(f"Member 'status' must be an integer from {low} to {high}.")
    target.health_status = status
    return {"status": status}
