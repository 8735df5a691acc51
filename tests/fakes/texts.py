"""Texts that tokenizers are tried on: any Unicode, code, scripts without spaces, runs, added tokens, cuts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

_CUTS = (" a", "a b", "x y z", "the end of the day ", "I'll be there ", "New York")
_RUNS = (" ", "\n", "\t", "0", "9", "=", "-", "a", "\u00a0", "的", "\u0301")
_CODE = (
    "def f(x):\n    return x\n",
    "\r\n\r\n",
    '{"a": [1, 2.5e3]}',
    "<div class='a b'>",
    "x_1 += y2; // c d\n",
)


def texts(added: Sequence[str], least_bytes: int = 0) -> st.SearchStrategy[str]:
    """Texts of up to some thousand characters; the pieces repeat until there are ``least_bytes``."""
    piece = st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
        st.text("abcdefghijklmnopqrstuvwxyz ABC'.,\n", max_size=60),
        st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=1, max_size=40),
        st.builds(str.__mul__, st.sampled_from(_RUNS), st.integers(1, 300)),
        st.integers(0, 10**60).map(str),
        st.sampled_from(_CUTS),
        st.sampled_from(_CODE),
        st.sampled_from(list(added)) if added else st.just(" "),
    )

    def long_enough(pieces: list[str]) -> str:
        text = "".join(pieces)
        size = len(text.encode())
        return text * (-(-least_bytes // size)) if 0 < size < least_bytes else text

    return st.lists(piece, min_size=1, max_size=40).map(long_enough)
