"""Text of every kind that the engine proof encodes, made from a random source with a fixed seed."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

KIND_BYTES: Final = 90_000
"""UTF-8 bytes of each kind; with fourteen kinds the proof is over more than 1 MiB."""

_SHORT: Final = 40
_LONG: Final = 3000

_WORD_LIST: Final = (
    "the of and to in is that it was for on are as with his they be at one have this from or had by not"
    " but what all were when we there can an your which their said if do will each about how up out them"
    " then she many some so these would other into has more her two like him see time could no make than"
    " first been its who now people my made over did down only way find use may water long little very"
    " after words called just where most know get through back much before go good new write our used me"
    " man too any day same right look think also around another came come work three word must because"
    " does part even place well such here take why things help put years different away again off went"
    " old number great tell men say small every found still between name should home big give air line"
    " set own under read last never us left end along while might next sound below saw something thought"
    " both few those always show large often together asked house don't I'll we've it's they're can't"
    " tokenizer throughput asynchronous latency HTTP JSON GPU API naïve café façade Zürich e.g. i.e. Mr."
)
_WORDS: Final = tuple(_WORD_LIST.split())
_SYLLABLE_LIST: Final = (
    "ab ac ant ber con de dis en er ex fi gram in ing ion ism ist ja ko ly ment non or per pre qu re sub"
    " str tion un ver xy z"
)
_SYLLABLES: Final = tuple(_SYLLABLE_LIST.split())
_CODE: Final = (
    "def {a}({b}: int = {n}) -> None:\n    return self.{a}[{b}] + {n}\n",
    "for (int {a} = 0; {a} < {n}; ++{a}) {{\n\t{b}[{a}] = {n}u;\n}}\n",
    "if {a} is not None and {b}.get('{a}') != \"{n}\":\n        raise ValueError(f'{{{a}!r}}')\n\n",
    "SELECT {a}, COUNT(*) FROM {b} WHERE {a} >= {n} GROUP BY 1;\n",
    "<div class=\"{a}-{b}\" id='{n}'>&nbsp;{a}</div>\r\n",
    "let {a}: Vec<{b}> = vec![0x{n:x}; {n}]; // {a}_{b}::<T>()\n",
    "#include <{a}/{b}.h>\n#define {a}_{b} ((void*)0x{n:08X})\n",
    "const {a} = async ({{ {b} }}) => await {b}?.{a}(`${{{n}}}`);\n",
)
_RANGES: Final = {
    "cjk": ((0x4E00, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x3000, 0x303F), (0x20000, 0x2A6DF)),
    "arabic": ((0x0600, 0x06FF), (0x0750, 0x077F), (0x0590, 0x05FF), (0x20, 0x20), (0xFE70, 0xFEFC)),
    "thai": ((0x0E01, 0x0E3A), (0x0E3F, 0x0E5B), (0x0E80, 0x0EFF), (0x0900, 0x097F)),
    "letters": ((0x00C0, 0x024F), (0x0370, 0x052F), (0x1E00, 0x1FFF), (0x20, 0x40), (0x2000, 0x206F)),
    "symbols": ((0x21, 0x7E), (0x2190, 0x23FF), (0x2500, 0x27BF), (0x1D400, 0x1D7FF), (0xFF00, 0xFFEF)),
}
_EMOJI: Final = (0x1F600, 0x1F468, 0x1F469, 0x1F9D1, 0x1F4BB, 0x2764, 0x1F44D, 0x1F3F3, 0x1F308, 0x1F1E9)
_JOINERS: Final = ("\u200d", "\ufe0f", "\U0001f3fd", "\u200d\u2642\ufe0f", "", "\u20e3", " ")
_RUNS: Final = (
    " ",
    "\t",
    "\n",
    "\r\n",
    " \n",
    "\u00a0",
    "\u3000",
    "0",
    "7",
    "00",
    "-",
    "=",
    "_",
    "!",
    "\u2028",
)
_CONTROLS: Final = (*map(chr, range(32)), *map(chr, range(127, 160)), "\u200b", "\ufeff", "\u00ad", "\ufffd")


def _word(rng: Random) -> str:
    word = rng.choice(_WORDS)
    if rng.random() < 0.2:
        word = "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 5)))
    if rng.random() < 0.1:
        word = rng.choice((word.upper(), word.title()))
    return word


def _name(rng: Random) -> str:
    glue = rng.choice(("", "_", "-"))
    return glue.join(rng.choices(_SYLLABLES, k=rng.randint(1, 4)))


def _english(rng: Random) -> str:
    return _word(rng) + rng.choice(
        (" ", " ", " ", " ", ", ", ". ", "; ", "? ", "!\n", " — ", ":\n\n", "\u2019s ")
    )


def _code(rng: Random) -> str:
    return rng.choice(_CODE).format(a=_name(rng), b=_name(rng), n=rng.getrandbits(rng.randint(1, 40)))


def _json(rng: Random) -> str:
    value: Any = [rng.random(), rng.getrandbits(48), None, True, _word(rng), 'é\n"\\']
    for _ in range(rng.randint(1, 3)):
        value = {_name(rng): value, _word(rng): rng.randint(-9, 10**9)}
    return json.dumps(value, indent=rng.choice((None, 2)), ensure_ascii=rng.random() < 0.5) + "\n"


def _letters_of(name: str) -> Callable[[Random], str]:
    ranges = _RANGES[name]

    def piece(rng: Random) -> str:
        first, last = rng.choice(ranges)
        text = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
        return text + rng.choice(("", "", "", " ", "\n", _word(rng)))

    return piece


def _emoji(rng: Random) -> str:
    return chr(rng.choice(_EMOJI) + rng.randint(0, 40) * rng.randint(0, 1)) + rng.choice(_JOINERS)


def _marks(rng: Random) -> str:
    marks = "".join(chr(rng.randint(0x0300, 0x036F)) for _ in range(rng.randint(0, 4)))
    text = rng.choice("aeiounAEIsS가ก") + marks
    return unicodedata.normalize(rng.choice(("NFC", "NFD")), text) + rng.choice(("", "", " "))


def _runs(rng: Random) -> str:
    return rng.choice(_RUNS) * rng.randint(1, 70) + rng.choice(("", "", _word(rng), str(rng.getrandbits(30))))


def _controls(rng: Random) -> str:
    return "".join(rng.choices(_CONTROLS, k=rng.randint(1, 4))) + rng.choice(("", "a", " ", _word(rng)))


def _scalars(rng: Random) -> str:
    code = rng.randrange(0x110000 - 0x800)
    return chr(code if code < 0xD800 else code + 0x800)


def _mixed(rng: Random) -> str:
    """Any other kind between words, so that cuts come behind and before all of them."""
    odd = rng.choice(KINDS[1:-1])(rng)
    mark = chr(rng.randint(0x0300, 0x036F)) if rng.random() < 0.2 else ""
    return f"{odd}{rng.choice(('', ' '))}{_word(rng)} {_word(rng)[:1]}{mark} {_word(rng)}"


KINDS: Final[tuple[Callable[[Random], str], ...]] = (
    _english,
    _code,
    _json,
    *map(_letters_of, _RANGES),
    _emoji,
    _marks,
    _runs,
    _controls,
    _scalars,
    _mixed,
)


def texts_of_kind(rng: Random, piece: Callable[[Random], str], size: int = KIND_BYTES) -> Iterator[str]:
    """Yield texts of one kind, ``size`` UTF-8 bytes together; half short ones, because ends differ most."""
    left = size
    while left > 0:
        wanted = rng.randint(1, _SHORT) if rng.random() < 0.5 else rng.randint(_SHORT, _LONG)
        pieces: list[str] = []
        while wanted > 0:
            pieces.append(piece(rng))
            wanted -= len(pieces[-1])
        text = "".join(pieces)
        left -= len(text.encode())
        yield text


def texts_of_added_tokens(rng: Random, added: Sequence[str]) -> Iterator[str]:
    """Yield every added token alone and inside text."""
    for token in added:
        yield token
        left, right = rng.choice(("", " ", "\n", _word(rng))), rng.choice(("", " ", "  ", _word(rng)))
        yield f"{_word(rng)}{left}{token}{right}{rng.choice(added)}{token} {_word(rng)}"
        yield f"{token[:-1]}{token}{token[1:]}"


def texts_of_ids(rng: Random, decode: Callable[[list[int]], str], vocabulary_size: int) -> Iterator[str]:
    """Yield random ids decoded to text, ``KIND_BYTES`` together."""
    left = KIND_BYTES
    while left > 0:
        text = decode([rng.randrange(vocabulary_size) for _ in range(rng.randint(1, 300))])
        left -= len(text.encode()) + 1
        yield text


def proof_texts(
    seed: int, added: Sequence[str], decode: Callable[[list[int]], str], vocabulary_size: int
) -> Iterator[str]:
    """Yield all texts of the proof; the same for the same arguments."""
    rng = Random(seed)
    yield ""
    for piece in KINDS:
        yield from texts_of_kind(rng, piece)
    yield from texts_of_added_tokens(rng, added)
    yield from texts_of_ids(rng, decode, vocabulary_size)
