"""Whatever the reader of long bodies says, the strict reader says too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshd.api.endpoints import ENDPOINTS
from meshd.api.facts import read_facts
from meshd.api.long_json import LONG_BYTES, MOST_BYTES, LongReader, open_long_reader
from meshd.api.rank_body import find_rank_free
from meshd.api.request_json import parse_body
from meshd.api.validation import read_request
from meshd.errors import MeshError

pytest.importorskip("simdjson")

PLACED = [endpoint for endpoint in ENDPOINTS if endpoint.has_prepare_job and endpoint.picks_by != "local"]
BY_NAME = {endpoint.name: endpoint for endpoint in PLACED}
BLANK = b" " * LONG_BYTES  # makes any body a long one


@pytest.fixture(scope="module")
def reader() -> LongReader:
    found = open_long_reader()
    assert found is not None
    return found


def outcome(endpoint: Any, body: bytes, reader: LongReader | None) -> Any:
    """The view of a body, or why it is refused."""
    try:
        members = read_request(endpoint, memoryview(body), reader, reads_text=False)
        view = read_facts(endpoint, members)
        view.rank_free = find_rank_free(members, body)
        return view
    except MeshError as refusal:
        return refusal.code, refusal.message


def assert_alike(body: bytes, reader: LongReader) -> None:
    """Both readers give the same members, and for every endpoint the same view or the same refusal."""
    members = reader.read(body) if body else None
    if members is not None:
        assert repr(members) == repr(parse_body(body)), "repr: 1 == 1.0 == True"
    for name in ("prompt", "text", "input"):
        opening = reader.open_text(body, name, 6) if body else None
        if opening is not None:
            assert repr(opening.members) == repr(reader.skim(body))
            text = parse_body(body)[name]
            assert text.startswith(opening.text)
            assert len(text.encode()) <= opening.text_bytes <= len(body)
    for endpoint in PLACED:
        for long_body in (body + BLANK, BLANK + body):
            assert outcome(endpoint, long_body, reader) == outcome(endpoint, long_body, None), endpoint.name


def nested(levels: int, core: bytes = b"") -> bytes:
    """A valid chat with an object around arrays, ``levels`` deep in all."""
    arrays = b"[" * (levels - 1) + core + b"]" * (levels - 1)
    return b'{"model":"m","messages":[1],"prompt":"p","a":' + arrays + b"}"


def around(member: bytes) -> bytes:
    """A body that is valid for every endpoint but for one member more."""
    return b'{"model":"m","stream":true,"messages":[1],"prompt":"p","input":"i",' + member + b"}"


WIDE = b"[" + b",".join([b'{"a":[]}'] * 100) + b"]"
NOT_JSON = [
    b"\xef\xbb\xbf" + around(b'"a":1'),
    around(b'"a":NaN'),
    around(b'"a":-Infinity'),
    around(b'"a":"\\ud800"'),
    around(b'"a":"\\udc00"'),
    around(b'"a":"\\udc00\\ud800"'),
    around(b'"\\ud800":1'),
    around(b'"a":"\xff"'),
    around(b'"a":"\xed\xa0\x80"'),
    around(b'"a":"\xc0\x80"'),
    around(b'"a":"\xf4\x90\x80\x80"'),
    around(b'"a":"\x01"'),
    around(b'"a":"\n"'),
    around(b'"a":"\\x"'),
    around(b'"a":01'),
    around(b'"a":1.'),
    around(b'"a":+1'),
    around(b'"a":1,'),
    around(b'"a":tru'),
    around(b'"a":[1,]'),
    around(b"'a':1"),
    around(b'"a":1') + b" x",
    around(b'"a":1') + b"{}",
    around(b'"a":1') + b"\0",
    around(b'"a":1') + b"\x0c",
    b"\x0c" + around(b'"a":1'),
    around(b'"a":1')[:-1],
    around(b'"a":"1')[:-1],
    b"[]",
    b'"text"',
    b"null",
    b"{",
    b'{"a"}',
    nested(513),
    nested(513, b"1"),
    nested(600),
    nested(1100),
    nested(20_000),
    b'{"prompt":"%s","a":%s%s}' % (b"p" * 300, b"[" * 600, b"]" * 600),
    b'{"prompt":"%s","a":1,"a\\u0000":%s%s}' % (b"p" * 300, b"[" * 600, b"]" * 600),
    # These close arrays that the reader has put around them, and open others.
    around(b'"a":%s' % WIDE) + b"],[" + around(b'"a":1'),
    around(b'"a":%s' % WIDE) + b"," + around(b'"a":1'),
    around(b'"a":%s' % WIDE) + b"]]]],[[[[" + around(b'"a":1'),
    around(b'"a":%s' % WIDE) + b"]" * 512 + b"[" * 512,
]
JSON = [
    b"{}",
    around(b'"a":1'),
    around(b'"a":-0,"n":2,"logprobs":true'),
    around(b'"n":2.0'),
    around(b'"n":1e30'),
    around(b'"n":18446744073709551615'),
    around(b'"n":18446744073709551616'),
    around(b'"n":-9223372036854775809'),
    around(b'"a":1e999'),
    around(b'"a":1e-9999'),
    around(b'"a":"\\ud83d\\ude00 \\u0000 \\/"'),
    around(b'"model":"m2"'),
    around(b'"model":5'),
    around(b'"prompt":["a","b"]'),
    around(b'"prompt":7'),
    around(b'"\\u006dodel":"m2"'),
    around(b'"\\u0070rompt":["a","b"]'),
    around(b'"model\\u0000":"m2"'),
    around(b'"messages\\u0000":[]'),
    around(b'"\\u0000":1'),
    around(b'"data_parallel_rank":3'),
    around(b'"data_parallel_rank":3,"b":{"data_parallel_rank":3}'),
    around(b'"a":%s' % WIDE),
    around(b'"a":%s,"messages":[]' % WIDE),
    around(b",".join(b'"m%d":[]' % n for n in range(100))),
    b'{"model":"m","prompt":"%s"}' % (b"word " * 20_000),
    b'{"stream":null,"prompt":"%s","model":"m"}' % (b"word\\n" * 20_000),
    '{{"model":"é","prompt":"{}"}}'.format("naïve 河流 " * 9000).encode(),
    b'{"model":"\\"m","prompt":"\\"input\\":\\"","input":[1]}',
    b'{"model":"m","prompt":{"prompt":"x"},"text":{"prompt":"x"}}',
    b'{"x":{"prompt":"a"},"prompt":["a",3]}',
    b'{"x":"\\\\","prompt":["a","b"]}',
    b'{"model":"m","prompt":"p","stop":["a"],"stream_options":{"include_usage":true}}',
    b'{"model":"m","prompt":"p","stop":%s}' % WIDE,
    b'{"model":"m","prompt":[[1,2],[3,18446744073709551616]]}',
    b'{"model":"m","prompt":[[1,2],[3,-0]],"input":[-0]}',
    b'{"model":"m","prompt":[[1,2],[3,1.5]]}',
    b'{"model":"m","input":[{"id":"a"},{"type":"message"}]}',
    b'{"model":"m","input":[{"type":null,"id":"a"}]}',
    b'{"model":"m","input":[{"type":"message","type":"item_reference"}],"store":false}',
    b'{"model":"m","input":"i","conversation":{"id":"c","id":""}}',
    b'{"model":"m","input":"i","conversation":{"id":"c"},"previous_response_id":{}}',
    b'{"model":"m","input":"i","previous_response_id":["a"],"store":false}',
    b'{"text":["a","b"],"input_ids":[],"input_embeds":[[0.5]],"return_logprob":true}',
    b'{"input_ids":[[1],[2]],"input_embeds":{}}',
    nested(511),
    nested(512),
    nested(511, b"1"),
    nested(512, b"1"),
]


@pytest.mark.parametrize("body", NOT_JSON + JSON)
def test_every_endpoint_hears_the_same_from_both_readers(body: bytes, reader: LongReader) -> None:
    assert_alike(body, reader)


@pytest.mark.parametrize("body", NOT_JSON)
def test_what_is_not_one_strict_json_object_is_left_to_the_strict_reader(
    body: bytes, reader: LongReader
) -> None:
    assert reader.skim(body) is None and reader.read(body) is None
    assert reader.skim(memoryview(body + BLANK)) is None and reader.read(memoryview(body + BLANK)) is None


def long_chat(messages: int) -> bytes:
    message = {"role": "user", "content": [{"type": "text", "text": 'Ünïcode, \n and [ " {' * 9}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return json.dumps({"model": "m1", "messages": [message] * messages, "tools": [tool], "n": 2}).encode()


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("chat", long_chat(20)),
        ("chat", long_chat(2000)),  # thousands of openings
        ("messages", long_chat(200)),
        ("completions", b'{"model":"m1","prompt":"%s","n":2}' % (b"word " * 50_000)),
        ("completions", b'{"prompt":"%s\\n","stop":["a"],"model":"m1"}' % (b"word " * 50_000)),
        ("completions", b'{"model":"m1","prompt":[%s1]}' % (b"1," * 50_000)),
        ("generate", b'{"text":"%s","model":"m1"}' % (b"word " * 50_000)),
        ("embeddings", b'{"model":"m1","input":["%s","b"]}' % (b"word " * 50_000)),
        ("responses", b'{"model":"m1","input":[{"role":"user","content":"%s"}]}' % (b"word " * 50_000)),
    ],
)
def test_the_bodies_that_clients_send_are_read(name: str, body: bytes, reader: LongReader) -> None:
    members = reader.skim(memoryview(body))
    assert members is not None
    assert list(members) == list(parse_body(body))
    assert members["model"] == "m1"
    assert outcome(BY_NAME[name], body, reader) == outcome(BY_NAME[name], body, None)


def test_a_reader_reads_on_after_a_body_it_could_not_read(reader: LongReader) -> None:
    for body in (*NOT_JSON, b'{"a":[],"a":[]}', b'{"a":%s,"a":[]}' % WIDE):
        assert reader.skim(body) is None
        assert reader.skim(b'{"model":"m"}') == {"model": "m"}


def test_all_of_a_body_is_read_unless_it_has_many_values(reader: LongReader) -> None:
    """Those, the strict reader reads as fast."""
    for body in (b'{"prompt":"%s","n":[1]}' % (b"word\\n" * 9000), long_chat(5)):
        assert reader.read(memoryview(body)) == json.loads(body)
    for messages, is_read in ((126, True), (127, False)):
        body = json.dumps({"messages": [{"content": "x"}] * messages}).encode()
        assert (reader.read(body) is not None) is is_read


def test_a_text_is_not_copied_out(reader: LongReader) -> None:
    assert reader.skim(b'{"model":"m","prompt":"%s"}' % (b"x" * 300)) == {"model": "m", "prompt": ""}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (b"one two three four", "one two three"),
        (b"one two \\n\\n four five", "one two \n\n"),
        (b"one \\ud83d\\ude00 three", "one"),
        (b"one \\u0020 four five six", "one  "),
        (b"one \\\\ \\\\ five six", "one \\ \\"),
        ("one né é é é five six".encode(), "one né é é"),
    ],
)
@pytest.mark.parametrize(
    "behind",
    [b"", b',"max_tokens":16', b' , "stop" : "a" ,"stream":true,"temperature":-1.5e3 ', b',"user":"u"\n'],
)
def test_the_opening_of_a_text_ends_at_a_space(
    written: bytes, text: str, behind: bytes, reader: LongReader
) -> None:
    body = b'{"model":"m", "prompt":"%s"%s}' % (written + b"x" * 300, behind)
    opening = reader.open_text(memoryview(body), "prompt", 14)
    assert opening == (reader.skim(body), text, len(written) + 300)


def test_the_length_of_a_text_before_other_members_than_short_ones_is_told_as_too_much(
    reader: LongReader,
) -> None:
    for behind in (b',"stop":["a"]', b',"user":"%s"' % (b"u" * 300), b',"suffix":"\\n"'):
        opening = reader.open_text(b'{"prompt":"a b c d%s"%s}' % (b"x" * 300, behind), "prompt", 8)
        assert opening is not None and opening.text == "a b c"
        assert 307 < opening.text_bytes <= 307 + len(behind) + 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"short","a":"%s"}' % (b"x " * 300),
        b'{"model":"m","text":"%s","prompt":"p"}' % (b"x " * 300),
        b'{"model":"m","prompt":["%s"]}' % (b"x " * 300),
        b'{"messages":[{"prompt":"%s"}]}' % (b"x " * 300),
        b'["prompt","%s"]' % (b"x " * 300),
        b" ",
        b'{"prompt":"%s"}' % (b"x" * 300),
        b'{"prompt":"%s","prompt":"p"}' % (b"x " * 300),
        b'{"prompt":"%s","a":NaN}' % (b"x " * 300),
        b'{"prompt":"' + b"x " * MOST_BYTES,
    ],
)
def test_what_is_not_one_long_text_has_no_opening(body: bytes, reader: LongReader) -> None:
    assert reader.open_text(body, "prompt", 64) is None


def test_a_body_that_would_make_large_buffers_is_left_to_the_strict_reader(reader: LongReader) -> None:
    body = b'{"a":1}' + b" " * MOST_BYTES
    assert reader.skim(body) is None and reader.read(body) is None


def test_many_members_are_left_to_the_strict_reader(reader: LongReader) -> None:
    """Each look-up goes through all of them."""
    assert reader.skim(json.dumps({f"m{n}": n for n in range(64)}).encode()) is not None
    assert reader.skim(json.dumps({f"m{n}": n for n in range(65)}).encode()) is None


READ = ["model", "stream", "messages", "prompt", "input", "text", "input_ids", "n", "logprobs", "store"]
READ += ["conversation", "previous_response_id", "input_embeds", "return_logprob", "data_parallel_rank"]
NAMES = st.sampled_from([*READ, "id", "x"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**66), 2**66)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", " ", "m", "item_reference"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
MEMBERS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


def written(members: list[tuple[str, Any]], is_ascii: bool) -> bytes:
    """An object with these members, a name as often as it stands there."""
    each = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=is_ascii)}" for name, value in members]
    return ("{" + ", ".join(each) + "}").encode("utf-8", "surrogatepass")


@settings(max_examples=300, deadline=None)
@given(MEMBERS, st.booleans())
def test_any_members_are_read_alike(members: list[tuple[str, Any]], is_ascii: bool) -> None:
    assert_alike(written(members, is_ascii), READER)


@settings(max_examples=300, deadline=None)
@given(
    MEMBERS,
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 2), st.binary(max_size=2)), min_size=1, max_size=3
    ),
)
@example([("model", "m"), ("prompt", "p")], [(1, 0, b"\\")])
def test_bodies_with_bytes_changed_put_in_or_taken_out_are_read_alike(
    members: list[tuple[str, Any]], changes: list[tuple[int, int, bytes]]
) -> None:
    body = written([("model", "m"), *members], False)
    for place, taken, put in changes:
        place %= len(body) + 1
        body = body[:place] + put + body[place + taken :]
    assert_alike(body, READER)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3), st.integers(0, 10**6), st.integers(0, 3))
def test_long_chats_with_bytes_changed_are_read_alike(put: bytes, place: int, taken: int) -> None:
    body = long_chat(150)
    place %= len(body)
    body = body[:place] + put + body[place + taken :]
    chat = BY_NAME["chat"]
    assert outcome(chat, body, READER) == outcome(chat, body, None)


READER = LongReader()
