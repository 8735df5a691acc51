from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshd.api.rank_body import MAX_PIECES, RANK_MEMBER, find_rank_free, ranked_body
from meshd.api.request_json import parse_body
from meshd.api.view import RoutingView
from meshd.errors import MeshError

BLANKS = st.text(" \t\r\n", max_size=3)
NUMBERS = st.sampled_from(["0", "-1.50e+3", "9" * 60, "1e999", "true", "null"])


@st.composite
def strings(draw) -> str:
    """JSON text of a string that looks like structure, escapes or raw Unicode."""
    pieces = st.sampled_from(
        ['\\"', "\\\\", "\\u005f", "\\/", "{", "}", "]", ",", ":", "é", "\u2028", RANK_MEMBER]
    )
    return '"' + "".join(draw(st.lists(pieces, max_size=6))) + '"'


def _array(values) -> st.SearchStrategy[str]:
    items = st.tuples(BLANKS, values, BLANKS).map("".join)
    return st.one_of(
        st.lists(items, min_size=1, max_size=3).map(lambda found: f"[{','.join(found)}]"),
        BLANKS.map(lambda blank: f"[{blank}]"),
    )


def _object(values) -> st.SearchStrategy[str]:
    members = st.tuples(BLANKS, strings(), BLANKS, st.just(":"), BLANKS, values, BLANKS).map("".join)
    nested_rank = values.map(lambda value: f'"{RANK_MEMBER}":{value}')
    return st.lists(st.one_of(members, nested_rank), max_size=3).map(lambda found: f"{{{','.join(found)}}}")


VALUES = st.recursive(NUMBERS | strings(), lambda inner: _array(inner) | _object(inner), max_leaves=6)


@st.composite
def rank_names(draw) -> str:
    """The member's name, plain or with some of its characters escaped."""
    if draw(st.booleans()):
        return f'"{RANK_MEMBER}"'
    return (
        '"'
        + "".join(f"\\u{ord(char):04x}" if draw(st.integers(0, 9)) == 0 else char for char in RANK_MEMBER)
        + '"'
    )


MEMBERS = st.tuples(st.booleans(), rank_names(), strings(), BLANKS, BLANKS, BLANKS, BLANKS, VALUES)


def removed(body: bytes, rank: int = 3) -> bytes:
    """The body as it is sent."""
    view = RoutingView("", rank_free=find_rank_free(parse_body(body), body))
    buffers, length = ranked_body(view, memoryview(body), rank)
    sent = b"".join(buffers)
    assert length == len(sent)
    return sent


@given(st.lists(MEMBERS, max_size=6), BLANKS, BLANKS, st.integers(0, 99))
@example([], "", " ", 0)
def test_every_byte_but_the_members_and_their_commas_stays(members, before, after, rank):
    names = {name for is_rank, _, name, *_ in members if not is_rank}
    if any(json.loads(name) == RANK_MEMBER for name in names):
        return
    pieces: list[str] = []
    expected: list[str] = []
    open_comma = -1  # place in ``expected`` of the last comma that stays so far
    for index, (is_rank, rank_name, name, b1, b2, b3, b4, value) in enumerate(members):
        is_last = index == len(members) - 1
        member = f"{rank_name if is_rank else name}{b2}:{b3}{value}"
        pieces += [b1, member, b4, "" if is_last else ","]
        expected += [b1, "" if is_rank else member, b4, "" if is_last or is_rank else ","]
        if is_rank and is_last and open_comma >= 0:
            expected[open_comma] = ""
        if not is_rank and not is_last:
            open_comma = len(expected) - 1
    body = f"{before}{{{''.join(pieces)}}}{after}".encode()
    sent = removed(body, rank)
    if names:
        assert sent == f'{before}{{{"".join(expected)},"{RANK_MEMBER}":{rank}}}'.encode()
    else:
        assert sent == f'{{"{RANK_MEMBER}":{rank}}}'.encode()
    original = json.loads(body)
    original.pop(RANK_MEMBER, None)
    assert json.loads(sent) == original | {RANK_MEMBER: rank}


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (
            '{"model":"m1","data_parallel_rank":9,"prompt":"a"}',
            '{"model":"m1","prompt":"a","data_parallel_rank":3}',
        ),
        ("{}", '{"data_parallel_rank":3}'),
        (' { "data_parallel_rank" : 1 } ', '{"data_parallel_rank":3}'),
        ('{"data_parallel_rank":1,"data_parallel_rank":2}', '{"data_parallel_rank":3}'),
        ('{"a":1 }\n', '{"a":1 ,"data_parallel_rank":3}'),
        ('{"a":1, "data_parallel_rank":2 }', '{"a":1  ,"data_parallel_rank":3}'),
        ('{"a":1,"data_parallel_rank":2,"data_parallel_rank":3}', '{"a":1,"data_parallel_rank":3}'),
        ('{"data_parallel_rank":2,"a":1,"data_parallel_rank":3}', '{"a":1,"data_parallel_rank":3}'),
        ('{"a":{"data_parallel_rank":2}}', '{"a":{"data_parallel_rank":2},"data_parallel_rank":3}'),
        ('{"data\\u005fparallel_rank":2,"a":1}', '{"a":1,"data_parallel_rank":3}'),
        ('{"data_parallel_rank ":2}', '{"data_parallel_rank ":2,"data_parallel_rank":3}'),
        ('{"data_parallel_rank":{"a":["}"]},"b":2}', '{"b":2,"data_parallel_rank":3}'),
    ],
)
def test_example_bodies(body, sent):
    assert removed(body.encode()).decode() == sent


def test_another_rank_changes_the_number_alone():
    body = b'{"n":1.50, "data_parallel_rank":7, "s":"\\u00e9"}'
    assert removed(body, 5) == removed(body, 3).replace(b":3}", b":5}")


def test_body_without_the_member_is_one_piece_of_the_clients_memory():
    body = memoryview(b'{"prompt":"a"}' + b" " * 1000)
    view = RoutingView("", rank_free=find_rank_free(parse_body(body), body))
    assert view.rank_free == (0, 13)
    buffers, _ = ranked_body(view, body, 0)
    assert isinstance(buffers[0], memoryview) and buffers[0].obj is body.obj


def test_body_of_a_view_made_without_pieces_goes_out_as_it_is():
    body = memoryview(b'{"data_parallel_rank":9}')
    assert ranked_body(RoutingView(""), body, 3) == ([body], len(body))


def test_length_is_that_of_the_bytes_sent_for_a_body_of_a_megabyte_too():
    body = json.dumps({"prompt": ["word " * 10] * 20000, RANK_MEMBER: 1, "x": "y" * 100000}).encode()
    assert len(body) > 1 << 20
    assert parse_body(removed(body))["prompt"][-1] == "word " * 10


def test_member_repeated_too_often_is_refused():
    def body(times: int) -> bytes:
        return b"{" + b'"data_parallel_rank":1,"a":2,' * times + b'"b":3}'

    assert removed(body(MAX_PIECES - 1)).count(b"data_parallel_rank") == 1
    with pytest.raises(MeshError) as refusal:
        removed(body(MAX_PIECES))
    assert (refusal.value.code, refusal.value.status) == ("invalid_request", 400)
    assert RANK_MEMBER in refusal.value.message
