from __future__ import annotations

from meshd.prepare.engine_proof import Encode, find_difference


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def test_one_differing_id_fails_and_its_text_is_numbered() -> None:
    def differs_on_joiner(text: str) -> list[int]:
        return [0 if byte == 0x8D else byte for byte in text.encode()]

    found = find_difference(by_bytes, differs_on_joiner, ["a", "b\u200d", "c"])
    assert found == "its ids differ on proof text 1 (2 characters)"


def test_an_exception_and_a_panic_fail_the_proof() -> None:
    class Panic(BaseException):
        pass

    def raises(error: BaseException) -> Encode:
        def encode(text: str) -> list[int]:
            raise error

        return encode

    assert find_difference(by_bytes, raises(ValueError()), ["a"]) == "it raised ValueError on proof text 0"
    assert find_difference(by_bytes, raises(Panic()), ["a"]) == "it raised Panic on proof text 0"


def test_equal_engines_pass() -> None:
    assert find_difference(by_bytes, lambda text: list(text.encode()), ["", "a", "é"]) == ""
