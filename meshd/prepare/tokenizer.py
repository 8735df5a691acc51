"""A model's tokenizer and chat template: loaded once in the leader, used in the prepare workers it forks.

``tokenizers`` is the reference engine. ``fastokens`` is faster by one to two orders and is used where
the engine proof found its ids equal. The leader loads and never encodes: the first encode of an engine
may start threads, and a process with threads must not fork.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jinja2
import tokenizers

from meshd.prepare.chat_template import ChatTemplate
from meshd.prepare.engine_proof import PROOF_SEED, Encode, prove_in_child
from meshd.prepare.proof_text import proof_texts

REFERENCE: Final = "tokenizers"
FAST: Final = "fastokens"
ENGINE_ERROR: Final = "engine_error"
"""Reason reported to ``on_fallback``."""

OnFallback = Callable[[str], None]


class LoadFailed(Exception):
    """A tokenizer cannot be loaded; the text says what is wrong with which file."""


class EncodeFailed(Exception):
    """The reference engine could not encode a text."""


class LoadedTokenizer:
    """One tokenizer with its chat template.

    ``engine``: the engine in use. ``template``: ``None`` if the model has none. ``warning``: what an
    operator should know about the choice of engine, empty if nothing.
    """

    def __init__(
        self,
        reference: Encode,
        fast: Encode | None = None,
        template: ChatTemplate | None = None,
        warning: str = "",
    ) -> None:
        self._reference = reference
        self._fast = fast
        self.template = template
        self.warning = warning

    @property
    def engine(self) -> str:
        return REFERENCE if self._fast is None else FAST

    def encode(self, text: str, on_fallback: OnFallback | None = None) -> list[int]:
        """Return the ids of ``text``; special tokens written in it are recognised, none are added.

        An exception of the fast engine costs a second encode by the reference and is reported to
        ``on_fallback``. Raises ``EncodeFailed``. Never call it in a leader.
        """
        if self._fast is not None:
            try:
                return self._fast(text)
            except BaseException as error:  # a panic of a Rust engine is no Exception
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                if on_fallback is not None:
                    on_fallback(ENGINE_ERROR)
        try:
            return self._reference(text)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise EncodeFailed(f"{type(error).__name__} in the tokenizer") from error

    def encode_head(self, text: str, count: int, on_fallback: OnFallback | None = None) -> list[int]:
        """Return the first ``count`` ids of ``text``: those that open the ids of the whole text."""
        return self.encode(text, on_fallback)[:count]


class TokenizerSet:
    """The tokenizers of a node by name; ``default`` serves every model without an entry of its own."""

    def __init__(self, entries: Mapping[str, LoadedTokenizer]) -> None:
        self._entries = dict(entries)

    def find(self, model: str) -> LoadedTokenizer | None:
        """Return the tokenizer of ``model``, ``None`` if no entry fits."""
        entries = self._entries
        found = entries.get("default")
        if model and model != "unknown":
            return entries.get(model, found)
        if found is None and len(entries) == 1:
            return next(iter(entries.values()))
        return found


def load_tokenizer(path: str, engine: str, chat_template_path: str | None = None) -> LoadedTokenizer:
    """Load the tokenizer at ``path``: a ``tokenizer.json``, or a directory that holds one.

    ``engine``: ``auto``, ``fastokens`` or ``tokenizers``. Starts no thread. Takes about two seconds and
    as much again for the proof, which runs in a child of its own. Raises ``LoadFailed``.
    """
    file = _tokenizer_file(Path(path))
    template = load_template(file.parent, chat_template_path)
    reference = _load_reference(file)
    if engine == REFERENCE:
        return LoadedTokenizer(_encode_with(reference), None, template)
    fast, reason = _load_fast(file)
    if fast is not None:
        reason = _prove(reference, fast)
    if not reason:
        return LoadedTokenizer(_encode_with(reference), fast, template)
    if engine == FAST:
        raise LoadFailed(f"the engine fastokens cannot be used for {file}: {reason}")
    warning = f"the engine fastokens is not used for {file}: {reason}"
    return LoadedTokenizer(_encode_with(reference), None, template, warning)


def load_template(directory: Path, chat_template_path: str | None = None) -> ChatTemplate | None:
    """Return the compiled chat template that belongs to a tokenizer's directory, ``None`` without one.

    First found: ``chat_template_path``; ``chat_template.jinja``; ``chat_template`` of
    ``tokenizer_config.json``, a text or a list of named ones. Raises ``LoadFailed``.
    """
    config = _read_json(directory / "tokenizer_config.json")
    beside = directory / "chat_template.jinja"
    sources: dict[str, str] = {}
    if chat_template_path:
        sources["default"] = _read_text(Path(chat_template_path))
    elif beside.is_file():
        sources["default"] = _read_text(beside)
    else:
        sources.update(_sources_of(config.get("chat_template")))
    if not sources:
        return None
    special = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    try:
        return ChatTemplate(sources, special)
    except (jinja2.TemplateError, RecursionError) as error:
        raise LoadFailed(f"the chat template of {directory} does not compile: {error}") from error


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise LoadFailed(f"there is no tokenizer.json at {path}")
    return file


def _load_reference(file: Path) -> tokenizers.Tokenizer:
    try:
        reference = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise LoadFailed(f"{file} is not a tokenizer: {error}") from error
    # A file may ask to cut or fill every text to one length; prompts are neither.
    reference.no_truncation()
    reference.no_padding()
    return reference


def _load_fast(file: Path) -> tuple[Encode | None, str]:
    """Return the fast engine's encode, or ``None`` and why there is none."""
    logging.getLogger("fastokens").setLevel(logging.WARNING)
    try:
        import fastokens
    except ImportError:
        return None, "the package fastokens is not installed"
    try:
        fast = fastokens.Tokenizer.from_file(str(file))
        fast.no_truncation()
        fast.no_padding()
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return None, f"it cannot load the file ({type(error).__name__}: {error})"
    return _encode_with(fast), ""


def _encode_with(engine: Any) -> Encode:
    encode = engine.encode

    def ids(text: str) -> list[int]:
        found: list[int] = encode(text, add_special_tokens=False).ids
        return found

    return ids


def _prove(reference: tokenizers.Tokenizer, fast: Encode) -> str:
    added = [token.content for token in reference.get_added_tokens_decoder().values()]

    def decode(ids: list[int]) -> str:
        return reference.decode(ids, skip_special_tokens=False)

    texts = proof_texts(PROOF_SEED, added, decode, reference.get_vocab_size())
    return prove_in_child(_encode_with(reference), fast, texts)


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFailed(f"the chat template {file} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in ``file``, empty if there is no file."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise LoadFailed(f"{file} does not hold a JSON object")
    return value


def _sources_of(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        return {}
    return {
        str(entry["name"]): str(entry["template"])
        for entry in value
        if isinstance(entry, dict) and "name" in entry and "template" in entry
    }


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template variables such as ``bos_token``: texts, where the file may have objects."""
    special: dict[str, Any] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special[name] = text
    extra = config.get("additional_special_tokens")
    if isinstance(extra, list):
        special["additional_special_tokens"] = [
            token.get("content") if isinstance(token, dict) else token for token in extra
        ]
    return special
