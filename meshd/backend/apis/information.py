"""The small fixed answers: models, server and model information, load, metrics, cache flush."""

from __future__ import annotations

from collections.abc import Sequence

from meshd.backend.apis.openai import CREATED, FINGERPRINT
from meshd.backend.reply import TEXT, Reply, json_reply


def models(served: Sequence[str]) -> Reply:
    data = [
        {"id": m, "object": "model", "created": CREATED, "owned_by": "meshd-backend", "root": m}
        for m in served
    ]
    return json_reply({"object": "list", "data": data})


def server_info(served: Sequence[str], ranks: int) -> Reply:
    return json_reply(
        {
            "served_model_name": served[0],
            "model_path": served[0],
            "tokenizer_path": served[0],
            "dp_size": ranks,
            "version": FINGERPRINT,
        }
    )


def model_info(served: Sequence[str]) -> Reply:
    return json_reply({"model_path": served[0], "tokenizer_path": served[0], "is_generation": True})


def load(ranks: int, active: int) -> Reply:
    """Report requests in progress as the load of rank 0; tokens are not kept, so a request counts as one."""
    rows = [{"dp_rank": r, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0} for r in range(ranks)]
    rows[0] |= {"num_reqs": active, "num_tokens": active}
    return json_reply(rows)


def metrics(served: int, active: int) -> Reply:
    """Render Prometheus text; the names hold a colon as those of inference servers do."""
    lines = (
        "# HELP meshd_backend:requests_total Requests answered.",
        "# TYPE meshd_backend:requests_total counter",
        f"meshd_backend:requests_total {served}",
        "# HELP meshd_backend:active_requests Requests in progress.",
        "# TYPE meshd_backend:active_requests gauge",
        f"meshd_backend:active_requests {active}",
    )
    return Reply(200, b"text/plain; version=0.0.4; charset=utf-8", "\n".join((*lines, "")).encode())


def flush_cache() -> Reply:
    return Reply(200, TEXT, b"Cache flushed.\n")
