"""The official OpenAI client: every call users make of it, plain and streamed, and the errors it raises."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import openai
import pytest

from tests.fakes.node import Node

ANSWER = "This is a deterministic answer to: Name a river"
USER = [{"role": "user", "content": "Name a river"}]


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="k", max_retries=0, timeout=20) as made:
        yield made


def test_chat_completion(client):
    answer = client.chat.completions.create(model="m1", messages=USER)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ANSWER.split())
    assert answer._request_id.startswith("chatcmpl-")


def test_chat_stream(client):
    options = {"include_usage": True}
    with client.chat.completions.create(
        model="m1", messages=USER, stream=True, stream_options=options
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(ANSWER.split())


def test_completion(client):
    answer = client.completions.create(model="m1", prompt=["Name a river", "and a lake"])
    assert [choice.text for choice in answer.choices] == [ANSWER, ANSWER.split(":")[0] + ": and a lake"]


def test_completion_stream(client):
    with client.completions.create(model="m1", prompt="Name a river", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER


def test_response(client):
    answer = client.responses.create(model="m1", input="Name a river", store=False)
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.usage.output_tokens == len(ANSWER.split())
    assert answer._request_id.startswith("resp-")


def test_response_stream(client):
    with client.responses.create(model="m1", input="Name a river", store=False, stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == ANSWER


def test_embeddings(client):
    """The client asks for base64 unless told otherwise and decodes it itself."""
    packed = client.embeddings.create(model="m1", input=["Name a river", "and a lake"])
    plain = client.embeddings.create(
        model="m1", input=["Name a river", "and a lake"], encoding_format="float"
    )
    assert len(packed.data) == 2 and len(packed.data[0].embedding) == 16
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, rel=1e-6)
    assert packed.data[0].embedding != packed.data[1].embedding


def test_models(client):
    assert [model.id for model in client.models.list()] == ["m1"]


def test_request_id_of_the_caller_comes_back(client):
    raw = client.chat.completions.with_raw_response.create(
        model="m1", messages=USER, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse()._request_id == "mine-7"


def test_async_client_runs_many_requests_at_once(node):
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="k", max_retries=0) as client:

            async def one(number: int) -> str:
                answer = await client.chat.completions.create(
                    model="m1", messages=[{"role": "user", "content": f"question {number}"}]
                )
                return answer.choices[0].message.content

            return await asyncio.gather(*(one(number) for number in range(50)))

    assert asyncio.run(ask()) == [
        f"This is a deterministic answer to: question {number}" for number in range(50)
    ]


# ------------------------------------------------------------------------------------------------ errors


def raised(call, kind: type[openai.APIStatusError], **arguments) -> openai.APIStatusError:
    with pytest.raises(kind) as caught:
        call(**arguments)
    error = caught.value
    assert type(error) is kind
    assert error.request_id == error.response.headers["x-request-id"] != ""
    return error


def test_bad_request_of_our_own(client):
    error = raised(client.chat.completions.create, openai.BadRequestError, model="m1", messages=[])
    assert (error.status_code, error.code, error.type) == (400, "invalid_request", "invalid_request_error")
    assert "messages" in error.body["message"]
    assert error.request_id.startswith("chatcmpl-")


def test_unknown_model(client):
    error = raised(client.responses.create, openai.NotFoundError, model="nope", input="a")
    assert (error.status_code, error.code, error.type) == (404, "model_not_found", "not_found_error")
    assert error.request_id.startswith("resp-")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
def test_error_of_the_upstream(client, status, kind):
    fault = {"x-backend-fault": f"status={status},retry-after=1"}
    error = raised(client.completions.create, kind, model="m1", prompt="a", extra_headers=fault)
    assert error.status_code == status
    assert error.code == "backend_fault"
    assert error.response.headers["retry-after"] == "1"
    assert "x-mesh-error-code" not in error.response.headers


def test_upstream_that_breaks_before_its_head(client):
    error = raised(
        client.completions.create,
        openai.InternalServerError,
        model="m1",
        prompt="a",
        extra_headers={"x-backend-fault": "close"},
    )
    assert (error.status_code, error.code) == (502, "upstream_connection_failed")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_stream_that_breaks_raises_and_never_looks_complete(client, api):
    fault = {"x-backend-fault": "cut=400"}
    start = (
        (lambda: client.chat.completions.create(model="m1", messages=USER, stream=True, extra_headers=fault))
        if api == "chat"
        else (lambda: client.completions.create(model="m1", prompt="a b", stream=True, extra_headers=fault))
    )
    with start() as stream, pytest.raises(openai.APIError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "upstream_connection_failed"


def test_responses_stream_that_breaks_ends_with_an_error_event(client):
    fault = {"x-backend-fault": "cut=2500"}
    types = []
    try:
        with client.responses.create(
            model="m1", input="a", store=False, stream=True, extra_headers=fault
        ) as stream:
            types += [event.type for event in stream]
    except openai.APIError as error:
        assert error.code == "upstream_connection_failed"
    else:
        assert types[-1] == "error"
    assert "response.completed" not in types


def test_client_retries_on_its_own_when_told_to_come_back(node, clean_backends):
    """429 and 503 are repeated by the client after the advice in ``retry-after``."""
    for backend in clean_backends:
        backend.fault("status=503,retry-after=1,times=1")
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="k", max_retries=4, timeout=20) as client:
        answer = client.completions.create(model="m1", prompt="Name a river")
    assert answer.choices[0].text == ANSWER


def test_stored_response_is_retrieved_listed_cancelled_and_deleted(client):
    made = client.responses.create(model="m1", input="Name a river")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    items = client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items.data] == ["Name a river"]
    assert client.responses.cancel(made.id).id == made.id
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.status_code == 404 and caught.value.request_id


def test_tools_reach_the_upstream_as_the_client_sent_them(client, clean_backends):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    client.chat.completions.create(
        model="m1", messages=[{"role": "user", "content": "a"}], tools=tools, tool_choice="auto"
    )
    seen = [r for backend in clean_backends for r in backend.requests() if "chat" in r["target"]]
    assert json.loads(base64.b64decode(seen[-1]["body"]))["tools"] == tools
