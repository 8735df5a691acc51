from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshd
from meshd.api.prefix_key import unpack_token_ids
from meshd.prepare import tokenizer as module
from meshd.prepare import tokenizer_proof
from meshd.prepare.chat_template import ChatRequest
from meshd.prepare.conversation_cache import FOR_SLOW, ConversationCache
from meshd.prepare.cut_proof import Cuts
from meshd.prepare.tokenizer import (
    EncodeFailed,
    LoadedTokenizer,
    LoadFailed,
    WorkerTools,
    load_tokenizer,
)
from meshd.prepare.tokenizer_proof import Found
from tests.fakes.tokenizer_events import RecordedEvents

SMALL = Path(meshd.__file__).parent / "backend" / "tokenizer"


class Panic(BaseException):
    """What a Rust engine raises when it panics."""


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def panics(text: str) -> list[int]:
    raise Panic


def interrupted(text: str) -> list[int]:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def brief_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove with a few texts; ``test_real_tokenizers`` has the whole proof."""
    texts = ("one two three", "a\u200db", "<|user|>Hi there<|end|>")
    monkeypatch.setattr(tokenizer_proof, "texts_for", lambda reference: iter(texts))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copy(SMALL / "tokenizer.json", tmp_path)
    return tmp_path


def rewrite(model: Path, **members) -> None:
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | members))


# --- encoding ---


def test_special_tokens_in_the_text_are_recognised_and_none_are_added():
    loaded = load_tokenizer(str(SMALL), "tokenizers")
    assert loaded.encode("<|user|>") == [2]
    ids = loaded.encode("<|user|>Hi<|end|>")
    assert (ids[0], ids[-1]) == (2, 0)


def test_the_head_opens_the_ids_of_the_whole_text():
    loaded = load_tokenizer(str(SMALL), "tokenizers")
    text = "Each process writes its own row, and readers sum. " * 20
    assert unpack_token_ids(loaded.packed_head(text, 16)) == loaded.encode(text)[:16]


def test_a_panic_of_the_fast_engine_is_counted_and_the_reference_answers():
    events = RecordedEvents()
    loaded = LoadedTokenizer(by_bytes, panics, tools=WorkerTools(events))
    assert loaded.encode("ab") == [97, 98]
    assert unpack_token_ids(loaded.packed_head("ab", 1)) == [97]
    assert events.fallbacks == ["engine_error", "engine_error"]


def test_a_failing_reference_is_an_encode_failure():
    with pytest.raises(EncodeFailed):
        LoadedTokenizer(panics, panics).encode("ab")


def test_an_interrupt_is_no_engine_failure():
    for loaded in (LoadedTokenizer(by_bytes, interrupted), LoadedTokenizer(interrupted)):
        with pytest.raises(KeyboardInterrupt):
            loaded.encode("ab")


# --- cutting ---

WORDS = "the end of the day " * 400


def counted(cuts: Cuts, cache: ConversationCache | None = None):
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return by_bytes(text)

    events = RecordedEvents()
    loaded = LoadedTokenizer(encode, cuts=cuts).for_worker(WorkerTools(events, cache))
    return loaded, seen, events


def test_without_the_proof_nothing_is_cut():
    loaded, seen, events = counted(Cuts(), ConversationCache())
    assert not (loaded.may_bound or loaded.may_reuse)
    assert unpack_token_ids(loaded.packed_head(WORDS, 4)) == by_bytes("the ")
    assert loaded.encode(WORDS) == by_bytes(WORDS)
    assert seen == [WORDS, WORDS]
    assert events.fallbacks == ["no_safe_cut"]


def test_where_heads_alone_are_proved_whole_texts_are_not_put_together():
    loaded, seen, events = counted(Cuts("", "why not"), ConversationCache())
    assert (loaded.may_bound, loaded.may_reuse) == (True, False)
    loaded.packed_head(WORDS, 4)
    loaded.encode(WORDS)
    assert len(seen[0]) <= 64
    assert seen[1:] == [WORDS]
    assert events.fallbacks == []


def test_with_the_proof_a_grown_text_costs_what_is_new():
    loaded, seen, _ = counted(Cuts("", ""), ConversationCache())
    loaded.encode(WORDS)
    seen.clear()
    grown = WORDS + "and the night "
    assert loaded.encode(grown) == by_bytes(grown)
    assert sum(map(len, seen)) < 2 * FOR_SLOW.piece


def test_tokenizers_that_share_a_cache_share_no_ids():
    tools = WorkerTools(RecordedEvents(), ConversationCache())
    cuts = Cuts("", "")
    one = LoadedTokenizer(by_bytes, cuts=cuts).for_worker(tools)
    other = LoadedTokenizer(lambda text: [7] * len(text), cuts=cuts).for_worker(tools)
    assert one.encode(WORDS) == by_bytes(WORDS)
    assert other.encode(WORDS) == [7] * len(WORDS)


def test_a_short_text_is_not_kept():
    cache = ConversationCache()
    loaded, _, _ = counted(Cuts("", ""), cache)
    loaded.encode("the end of the day " * 20)
    assert len(cache) == 0


# --- loading ---


def test_a_directory_and_a_file_load_alike():
    for path in (SMALL, SMALL / "tokenizer.json"):
        loaded = load_tokenizer(str(path), "tokenizers")
        assert (loaded.engine, loaded.warning) == ("tokenizers", "")
        assert loaded.template is not None


def test_truncation_and_padding_of_the_file_are_switched_off(model):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    rewrite(model, truncation=truncation)
    assert len(load_tokenizer(str(model), "tokenizers").encode("one two three four five six")) > 2


def test_what_is_no_tokenizer_fails_to_load(tmp_path):
    with pytest.raises(LoadFailed, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path), "tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadFailed, match="not a tokenizer"):
        load_tokenizer(str(tmp_path), "tokenizers")


def test_equal_engines_make_the_fast_one_used(monkeypatch):
    monkeypatch.setattr(module, "_load_fast", lambda file: (reference_ids(), ""))
    for engine in ("auto", "fastokens"):
        loaded = load_tokenizer(str(SMALL), engine)
        assert (loaded.engine, loaded.warning) == ("fastokens", "")


def test_an_engine_that_differs_in_one_id_is_not_used(monkeypatch):
    encode = reference_ids()

    def differs(text: str) -> list[int]:
        ids = encode(text)
        return [0, *ids[1:]] if "\u200d" in text and ids else ids

    monkeypatch.setattr(module, "_load_fast", lambda file: (differs, ""))
    loaded = load_tokenizer(str(SMALL), "auto")
    assert loaded.engine == "tokenizers"
    assert "its ids differ" in loaded.warning
    with pytest.raises(LoadFailed, match="its ids differ"):
        load_tokenizer(str(SMALL), "fastokens")


def test_a_missing_fast_engine_is_a_warning_or_a_failed_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    loaded = load_tokenizer(str(SMALL), "auto")
    assert loaded.engine == "tokenizers"
    assert "not installed" in loaded.warning
    with pytest.raises(LoadFailed, match="not installed"):
        load_tokenizer(str(SMALL), "fastokens")


def test_texts_may_be_cut_where_the_proof_held_for_the_engine_in_use(monkeypatch):
    encode = reference_ids()

    def differs_at_the_end(text: str) -> list[int]:
        return [*encode(text), 0] if text == "one" else encode(text)

    monkeypatch.setattr(module, "_load_fast", lambda file: (differs_at_the_end, ""))
    loaded = load_tokenizer(str(SMALL), "auto")
    assert loaded.engine == "fastokens"
    assert not loaded.may_bound
    assert "proof text 0" in loaded.cuts.head
    assert load_tokenizer(str(SMALL), "tokenizers").may_bound


def test_an_engine_that_kills_its_proof_leaves_the_reference_with_its_own(monkeypatch):
    def dies(text: str) -> list[int]:
        os._exit(3)

    monkeypatch.setattr(module, "_load_fast", lambda file: (dies, ""))
    loaded = load_tokenizer(str(SMALL), "auto")
    assert loaded.engine == "tokenizers"
    assert "died" in loaded.warning
    assert (loaded.may_bound, loaded.may_reuse) == (True, True)


def test_the_source_and_the_size_of_the_vocabulary_are_known():
    loaded = load_tokenizer(str(SMALL), "tokenizers")
    assert loaded.source == str(SMALL / "tokenizer.json")
    assert loaded.vocab_size == 3072


def test_loading_with_the_proof_starts_no_thread():
    pytest.importorskip("fastokens")
    script = (
        "import os, sys\n"
        "from meshd.prepare.tokenizer import load_tokenizer\n"
        "loaded = load_tokenizer(sys.argv[1], 'auto')\n"
        "print(loaded.engine, len(os.listdir('/proc/self/task')))\n"
    )
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
    done = subprocess.run(
        [sys.executable, "-c", script, str(SMALL)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["fastokens", "1"]


def reference_ids():
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    return lambda text: reference.encode(text, add_special_tokens=False).ids


# --- the chat template of a model's directory ---


def prompt(model: Path, chat_template_path: str | None = None, **request) -> str | None:
    template = load_tokenizer(str(model), "tokenizers", chat_template_path).template
    if template is None:
        return None
    return template.render(ChatRequest([{"role": "user", "content": "Hi"}], **request), 1000)


def test_the_first_template_found_is_used(model, tmp_path):
    assert prompt(model) is None
    config = {"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<s>"}, "eos_token": None}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert prompt(model) == "config <s>"
    (model / "chat_template.jinja").write_text("beside {{ bos_token }}")
    assert prompt(model) == "beside <s>"
    given = tmp_path / "given.jinja"
    given.write_text("given {{ bos_token }}")
    assert prompt(model, str(given)) == "given <s>"


def test_named_templates_of_the_config_are_told_apart(model):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert prompt(model) == "plain"
    assert prompt(model, tools=[{}]) == "tools"


def test_special_tokens_come_from_their_map_unless_the_config_has_them(model):
    (model / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<a>", "eos_token": "<b>"}))
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<c>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert prompt(model) == "<c><b>"


def test_a_template_that_does_not_compile_fails_the_load(model):
    (model / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(LoadFailed, match="does not compile"):
        load_tokenizer(str(model), "tokenizers")


def test_a_missing_template_file_or_a_broken_config_fails_the_load(model, tmp_path):
    with pytest.raises(LoadFailed, match="cannot be read"):
        load_tokenizer(str(model), "tokenizers", str(tmp_path / "missing.jinja"))
    (model / "tokenizer_config.json").write_text("{")
    with pytest.raises(LoadFailed, match="cannot be read"):
        load_tokenizer(str(model), "tokenizers")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,  # more blocks than CPython compiles
        "{% if a %}" * 120 + "{% endif %}" * 120,
        "{{ 10 ** 5000 }}",  # a constant that cannot be written down
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
)
def test_a_template_that_breaks_the_compiler_fails_the_load(model, source):
    (model / "chat_template.jinja").write_text(source)
    with pytest.raises(LoadFailed, match="does not compile"):
        load_tokenizer(str(model), "tokenizers")


def test_what_is_no_regular_file_beside_a_tokenizer_fails_the_load_at_once(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoadFailed, match="no regular file"):
        load_tokenizer(str(model), "tokenizers", str(tmp_path / "pipe"))
    os.mkfifo(model / "tokenizer_config.json")
    with pytest.raises(LoadFailed, match="no regular file"):
        load_tokenizer(str(model), "tokenizers")
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(LoadFailed, match="no regular file"):
        load_tokenizer(str(model), "tokenizers")


def test_a_configuration_nested_too_deep_fails_the_load(model):
    (model / "tokenizer_config.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    with pytest.raises(LoadFailed, match="cannot be read"):
        load_tokenizer(str(model), "tokenizers")


def test_a_tokenizer_that_vanishes_while_it_is_loaded_fails_the_load(model, monkeypatch):
    def vanished(*_):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(module, "file_digest", vanished)
    with pytest.raises(LoadFailed, match="cannot be read: No such file"):
        load_tokenizer(str(model), "tokenizers")


def test_a_tokenizer_that_changes_while_it_is_loaded_fails_the_load(model, monkeypatch):
    inner = module._load_reference

    def load(file: Path):
        reference = inner(file)
        rewrite(model, padding=None)
        return reference

    monkeypatch.setattr(module, "_load_reference", load)
    with pytest.raises(LoadFailed, match="has changed while it was loaded"):
        load_tokenizer(str(model), "tokenizers", may_defer=True)
    monkeypatch.undo()
    assert load_tokenizer(str(model), "tokenizers", may_defer=True).unproved is not None


def test_a_fast_engine_that_is_not_waited_for_comes_from_the_same_bytes_or_not_at_all(model, monkeypatch):
    loads = []

    def load(file):
        loads.append(file)
        return reference_ids(), ""

    monkeypatch.setattr(module, "_load_fast", load)
    for changes in (False, True):
        loaded = load_tokenizer(str(model), "auto", may_defer=True)
        assert (loaded.engine, loads) == ("tokenizers", [])
        if changes:
            rewrite(model, version="2.0")
        loaded.unproved.complete()
        assert loads.pop() == model / "tokenizer.json"
        used = loaded.proved(Found("", Cuts("", "")))
        assert used.engine == ("tokenizers" if changes else "fastokens")
        assert ("it has changed" in used.warning) is changes
