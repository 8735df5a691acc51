import hashlib

from hypothesis import given
from hypothesis import strategies as st

from meshd.backend.text import (
    answer_to,
    content_text,
    count_tokens,
    count_words,
    digest_of,
    last_user_text,
    preview,
    text_of_ids,
)


def test_answer_repeats_the_words_of_the_prompt_and_stops() -> None:
    output = answer_to("Name  a\n river")
    assert output.text == "This is a deterministic answer to: Name a river"
    assert (len(output.words), output.is_cut) == (9, False)


def test_limit_below_the_answer_cuts_it() -> None:
    output = answer_to("Name a river", 4)
    assert (output.text, output.is_cut) == ("This is a deterministic", True)


def test_limit_equal_to_the_answer_does_not_cut_it() -> None:
    assert not answer_to("Name a river", 9).is_cut
    assert answer_to("Name a river", 8).is_cut


def test_limit_zero_answers_nothing() -> None:
    output = answer_to("x", 0)
    assert (output.text, list(output.pieces()), output.is_cut) == ("", [], True)


def test_empty_prompt_is_answered_with_nothing() -> None:
    assert answer_to("").text == answer_to(" \n\t").text == "This is a deterministic answer to: (nothing)"


def test_default_limit_is_64_words() -> None:
    output = answer_to("a " * 80)
    assert (len(output.words), output.is_cut) == (64, True)


def test_ignored_eos_repeats_the_answer_to_the_limit_and_is_always_cut() -> None:
    words = answer_to("x").words
    output = answer_to("x", 16, ignores_eos=True)
    assert list(output.words) == [*words, *words, *words[:2]]
    assert output.is_cut and answer_to("x", 7, ignores_eos=True).is_cut


def test_preview_is_cut_to_160_code_points_not_bytes() -> None:
    assert preview("é" * 200) == "é" * 160
    assert preview("ab " * 100) == ("ab " * 100)[:160]


@given(st.text(alphabet=" \n\u3000aé😀", max_size=600))
def test_preview_reads_only_the_start_and_yet_equals_the_rule(text: str) -> None:
    assert preview(text) == " ".join(text.split())[:160]


@given(st.text(max_size=200), st.integers(0, 40), st.booleans())
def test_pieces_concatenate_to_the_text(prompt: str, limit: int, ignores_eos: bool) -> None:
    output = answer_to(prompt, limit, ignores_eos=ignores_eos)
    pieces = list(output.pieces())
    assert "".join(pieces) == output.text
    assert len(pieces) == len(output.words)


def test_tokens_are_words_of_all_texts() -> None:
    assert count_tokens(["a b", "", " c\n"]) == 3


@given(st.text(alphabet=" \n\x1c\x1f\x85\u3000aé", max_size=40) | st.text(st.characters(max_codepoint=127)))
def test_words_are_counted_as_they_split(text: str) -> None:
    assert count_words(text) == len(text.split())


def test_ids_are_decimal_words() -> None:
    assert text_of_ids([1, 22, 0]) == "1 22 0"


def test_digest_of_the_example_body() -> None:
    body = b'{"model":"meshd-demo","messages":[{"role":"user","content":"Name a river"}]}'
    assert digest_of(body) == "be50ca8a97520f91a91a4187" == hashlib.sha256(body).hexdigest()[:24]


def test_text_parts_are_joined_by_one_space_and_others_skipped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, 7, {"text": "b"}]
    assert content_text(parts) == "a b"
    assert content_text(None) == content_text({"text": "x"}) == ""


def test_last_user_message_counts_whatever_follows_it() -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "third"},
        "junk",
    ]
    assert last_user_text(messages) == "second"
    assert last_user_text([{"role": "system", "content": "x"}]) == ""
