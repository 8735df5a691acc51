"""A model's tokenizer and chat template: loaded once in the leader, used in the prepare workers it forks.

``tokenizers`` is the reference engine. ``fastokens`` is faster by one to two orders and is used where
the engine proof found its ids equal. The leader loads and never encodes: the first encode of an engine
may start threads, and a process with threads must not fork.

A panic in an engine, which is Rust, is no ``Exception``: hence the broad clauses around each call of one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from meshd.api.prefix_key import pack_token_ids
from meshd.prepare.chat_template import ChatTemplate
from meshd.prepare.conversation_cache import FOR_FAST, FOR_SLOW, ConversationCache
from meshd.prepare.crosscheck import CheckedEngine, CrossCheck, EngineSwitch, LocalSwitch
from meshd.prepare.cut_proof import Cuts
from meshd.prepare.engine_proof import Encode
from meshd.prepare.model_files import check_tokenizer_file, read_text
from meshd.prepare.packed_engine import PackedEngine
from meshd.prepare.prefix_tokens import packed_head, packed_opening
from meshd.prepare.proof_record import NoProofs, Proofs, file_digest
from meshd.prepare.template_trial import TemplateUnfit, try_template
from meshd.prepare.tokenizer_events import NoEvents, TokenizerEvents
from meshd.prepare.tokenizer_proof import FAST, REFERENCE, Found, LoadFast, Unproved, encode_with, prove

Decode = Callable[[list[int], bool], str]


class LoadFailed(Exception):
    """A tokenizer cannot be loaded; the text says what is wrong with which file."""


class EncodeFailed(Exception):
    """The reference engine could not encode a text."""


class DecodeFailed(Exception):
    """The reference engine could not turn ids into a text."""


@dataclass(frozen=True, slots=True)
class WorkerTools:
    """What the tokenizers of one prepare worker share. ``crosscheck``: ``None`` if nothing is repeated."""

    events: TokenizerEvents
    cache: ConversationCache | None = None
    crosscheck: CrossCheck | None = None


class LoadedTokenizer:
    """One tokenizer with its chat template.

    ``template``: ``None`` if the model has none. ``warning``: what an operator should know about the choice
    of engine, empty if nothing. ``cuts``: where its texts may be cut. ``source``: names it in the log.
    ``unproved``: set while its proof has not been run: until then the reference encodes every text whole.
    A leader loads it; ``for_worker`` gives it to a prepare worker, where it counts, checks and remembers.
    """

    def __init__(
        self,
        reference: Encode,
        fast: Encode | None = None,
        template: ChatTemplate | None = None,
        warning: str = "",
        decode: Decode | None = None,
        *,
        vocab_size: int = 0,
        cuts: Cuts | None = None,
        source: str = "",
        tools: WorkerTools | None = None,
        switch: EngineSwitch | None = None,
        unproved: Unproved | None = None,
    ) -> None:
        self.unproved = unproved
        self._reference = reference
        self._fast = fast
        self._decode = decode
        self.template = template
        self.warning = warning
        self.vocab_size = vocab_size
        self.cuts = cuts or Cuts()
        self.source = source
        self._switch = switch or LocalSwitch()
        tools = tools or WorkerTools(NoEvents())
        self._events = tools.events
        self._checked: CheckedEngine | None = None
        if fast is not None:
            self._checked = CheckedEngine(
                fast, self._encode_reference, self._switch, tools.crosscheck, tools.events, source
            )
        self._cache = tools.cache if self.may_reuse else None
        self._roots = (-1, -1) if self._cache is None else (self._cache.new_root(), self._cache.new_root())

    def for_worker(self, tools: WorkerTools, switch: EngineSwitch | None = None) -> LoadedTokenizer:
        """Return the same tokenizer at work in a prepare worker. ``switch``: of this tokenizer."""
        return LoadedTokenizer(
            self._reference,
            self._fast,
            self.template,
            self.warning,
            self._decode,
            vocab_size=self.vocab_size,
            cuts=self.cuts,
            source=self.source,
            tools=tools,
            switch=switch,
        )

    def proved(self, found: Found) -> LoadedTokenizer:
        """Return the same tokenizer as its proof allows it to work; it is ``unproved``."""
        assert self.unproved is not None
        reason = found.difference or self.unproved.missing
        return LoadedTokenizer(
            self._reference,
            None if found.difference else self.unproved.fast,
            self.template,
            _not_used(self.source, reason) if reason else "",
            self._decode,
            vocab_size=self.vocab_size,
            cuts=found.cuts,
            source=self.source,
        )

    @property
    def engine(self) -> str:
        """The engine in use."""
        return REFERENCE if self._fast is None or self._switch.is_off else FAST

    @property
    def may_bound(self) -> bool:
        """Whether the head of a text may be tokenized without its rest."""
        return not self.cuts.head

    @property
    def may_reuse(self) -> bool:
        """Whether the ids of a text may be put together from those of its pieces."""
        return not (self.cuts.head or self.cuts.pieces)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; special tokens written in it are recognised, none are added.

        Raises ``EncodeFailed``. Never call it in a leader.
        """
        checked = self._checked
        if checked is not None and not self._switch.is_off:
            ids = self._encode_whole(text, checked.encode, is_fast=True)
            if not self._switch.is_off:
                return ids
        return self._encode_whole(text, self._encode_reference, is_fast=False)

    def packed_head(self, text: str, count: int) -> bytes:
        """Return the first ``count`` ids of ``text``, packed: those that open the ids of the whole text.

        Costs what ``count`` costs, not what ``text`` does, where the tokenizer and the text allow it.
        Raises ``EncodeFailed``. Never call it in a leader.
        """
        checked = self._checked
        if checked is not None and not self._switch.is_off:
            packed = packed_head(text, count, checked.pack, self.may_bound, self._events)
            if not self._switch.is_off:
                return packed
        return packed_head(text, count, self._pack_reference, self.may_bound, self._events)

    def packed_opening(self, text: str, count: int, text_bytes: int) -> bytes | None:
        """Return what ``packed_head`` would of a text that begins with ``text`` and has ``text_bytes``.

        ``None`` if that takes all of it. Raises ``EncodeFailed``.
        """
        if not self.may_bound:
            return None
        checked = self._checked
        if checked is not None and not self._switch.is_off:
            packed = packed_opening(text, count, checked.pack, self._events, text_bytes)
            if not self._switch.is_off:
                return packed
        return packed_opening(text, count, self._pack_reference, self._events, text_bytes)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of ``ids``, always by the reference engine. Raises ``DecodeFailed``."""
        if self._decode is None:
            raise DecodeFailed("the tokenizer has no decoder")
        try:
            return self._decode(ids, skip_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise DecodeFailed(f"{type(error).__name__} in the tokenizer") from error

    def _encode_whole(self, text: str, encode: Encode, is_fast: bool) -> list[int]:
        cache = self._cache
        form = FOR_FAST if is_fast else FOR_SLOW
        if cache is None or len(text) < form.piece:
            return encode(text)
        return cache.encode(self._roots[is_fast], text, encode, form)

    def _encode_reference(self, text: str) -> list[int]:
        try:
            return self._reference(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise EncodeFailed(f"{type(error).__name__} in the tokenizer") from error

    def _pack_reference(self, text: str) -> bytes:
        return pack_token_ids(self._encode_reference(text))

    def __repr__(self) -> str:
        return f"LoadedTokenizer({self.source!r}, engine={self.engine}, cuts={self.cuts})"


def load_tokenizer(
    path: str,
    engine: str,
    chat_template_path: str | None = None,
    proofs: Proofs | None = None,
    *,
    may_defer: bool = False,
) -> LoadedTokenizer:
    """Load the tokenizer at ``path``: a ``tokenizer.json``, or a directory that holds one.

    ``engine``: ``auto``, ``fastokens`` or ``tokenizers``. Starts no thread. Takes a third of a second,
    another one for the fast engine, and several for the proof, which runs in a child of its own, unless
    ``proofs`` has it. With ``may_defer`` a proof that nobody has run yet is left to the caller, as
    ``unproved``, and the fast engine with it, except for ``fastokens``, whose load fails with it. Raises
    ``LoadFailed``.
    """
    file = _tokenizer_file(Path(path))
    template = load_template(file.parent, chat_template_path)
    unproved = _load_unproved(file, None if engine == REFERENCE else partial(_load_fast_if_same, file))
    reference = unproved.reference
    loaded = LoadedTokenizer(
        encode_with(reference),
        None,
        template,
        decode=_decode_with(reference),
        vocab_size=reference.get_vocab_size(),
        source=str(file),
        unproved=unproved,
    )
    proofs = proofs or NoProofs()
    defers = may_defer and engine != FAST
    found = unproved.find(proofs)
    if found is None and defers:
        return loaded
    unproved.complete()
    if unproved.missing:
        if engine == FAST:
            raise LoadFailed(f"the engine fastokens cannot be used for {file}: {unproved.missing}")
        found = unproved.find(proofs)  # the proof without that engine has another name
    if found is None and defers:
        return loaded
    if found is None:
        found = prove(unproved)
        proof = unproved.proof_of(found)
        if proof is not None:
            proofs.keep(proof)
    if engine == FAST and found.difference:
        raise LoadFailed(f"the engine fastokens cannot be used for {file}: {found.difference}")
    return loaded.proved(found)


def _not_used(source: str, reason: str) -> str:
    return f"the engine fastokens is not used for {source}: {reason}"


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
    elif os.path.exists(beside):
        sources["default"] = _read_text(beside)
    else:
        sources.update(_sources_of(config.get("chat_template")))
    if not sources:
        return None
    special = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    try:
        return try_template(sources, special)
    except TemplateUnfit as error:
        raise LoadFailed(f"the chat template of {directory}: {error}") from error


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if os.path.isdir(path) else path
    try:
        check_tokenizer_file(file)
    except OSError as error:
        raise LoadFailed(f"there is no tokenizer.json at {path}: {error.strerror}") from error
    return file


def _load_reference(file: Path) -> tokenizers.Tokenizer:
    try:
        reference = tokenizers.Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise LoadFailed(f"{file} is not a tokenizer: {error}") from error
    # A file may ask to cut or fill every text to one length; prompts are neither.
    reference.no_truncation()
    reference.no_padding()
    return reference


def _load_unproved(file: Path, load_fast: LoadFast | None) -> Unproved:
    try:
        version = _version_of(file)
        reference = _load_reference(file)
        digest = file_digest(file)
        is_same = _version_of(file) == version
    except OSError as error:
        raise LoadFailed(f"{file} cannot be read: {error.strerror}") from error
    if not is_same:  # the digest, and proofs that are known by it, would be another tokenizer's
        raise LoadFailed(f"{file} has changed while it was loaded")
    return Unproved(digest, reference, load_fast=load_fast)


def _version_of(file: Path) -> tuple[int, int, int]:
    """Return what differs once the file has been written or replaced; does not read it."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _load_fast_if_same(file: Path, digest: str) -> tuple[Encode | None, str]:
    """Load the fast engine from the bytes that the reference has: both are one tokenizer."""
    fast, missing = _load_fast(file)
    try:
        is_same = fast is None or file_digest(file) == digest
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"
    return (fast, missing) if is_same else (None, "it has changed since the reference was loaded")


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
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return None, f"it cannot load the file ({type(error).__name__}: {error})"
    flat = getattr(fast, "encode_batch_flat", None)
    return encode_with(fast) if flat is None else PackedEngine(flat), ""


def _decode_with(reference: tokenizers.Tokenizer) -> Decode:
    def text_of(ids: list[int], skip_special_tokens: bool) -> str:
        text: str = reference.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    return text_of


def _read_text(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFailed(f"the chat template {file} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in ``file``, empty if there is no file."""
    try:
        value = json.loads(read_text(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
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
