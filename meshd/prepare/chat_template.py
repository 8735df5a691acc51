"""A model's chat template: messages to the prompt text that an upstream would tokenize.

Templates are foreign code, so they run in jinja2's immutable sandbox without a loader, and their output
is counted while it is produced. They are compiled once, in the leader, before it forks.

What a template keeps for itself is bounded too: macros and ``{% set %}`` blocks collect text that is no
output yet, and a variable that is added to itself doubles with each turn of a loop.

How a template wants the content of a message is found by rendering probes: one that loops over content
parts gets parts, any other a string. A template that takes both keeps whichever form the client sent,
which is what the tokenizers' own renderer does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshd.prepare.chat_messages import ContentForm, conform, mark_final

MESSAGE_BYTES: Final = 512
"""Most bytes of a template's own message that an answer repeats."""

_PROBE: Final = "meshd probe text"
_PROBE_PART: Final = {"type": "text", "text": _PROBE, "meshd_probe_key": ""}
_KEPT_FACTOR: Final = 16
_KEPT_LEAST: Final = 1 << 20
"""Text that macros and blocks may collect in one rendering: so many times what the output may have. It is
also the bound of one string or list that is built by adding or multiplying."""
_PROBE_BYTES: Final = 1 << 16
_FINAL_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # its space tells whether the template trims


class OutputTooLong(Exception):
    """The template produced more than its limit; nothing of it is kept."""


class TemplateRefusal(Exception):
    """The template failed or refused the messages; the text is for the client."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What one rendering depends on: messages as objects, and the members of the request beside them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    reasoning_effort: Any = None
    template_kwargs: Mapping[str, Any] | None = None
    is_continuing: bool = False


class ChatTemplate:
    """The compiled template of one model.

    ``sources``: by name; ``default`` is used unless the request has tools and there is a ``tool_use``.
    ``special_tokens``: variables such as ``bos_token``. ``forms``: what ``forms`` of the same template said
    before, so that it is not probed again. Raises ``ValueError`` if there is no usable source, and whatever
    jinja2 and the compiler of Python raise for a source that does not compile.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, Any],
        now: Callable[[], datetime] = datetime.now,
        *,
        forms: tuple[ContentForm, ContentForm] | None = None,
    ) -> None:
        environment = self._environment = _environment(now)
        self._special_tokens = dict(special_tokens)
        compiled = {name: environment.from_string(source) for name, source in sources.items()}
        if not compiled:
            raise ValueError("the list of chat templates is empty")
        default = compiled.get("default") or next(iter(compiled.values()))
        with_tools = compiled.get("tool_use") or default
        if forms is None:
            form = self._find_form(default)
            forms = form, form if with_tools is default else self._find_form(with_tools)
        self._default = default, forms[0]
        self._tool_use = with_tools, forms[1]

    @property
    def forms(self) -> tuple[ContentForm, ContentForm]:
        """How the template, and the one for requests with tools, read content."""
        return self._default[1], self._tool_use[1]

    def render(self, request: ChatRequest, limit_bytes: int) -> str:
        """Return the prompt of ``request``.

        Raises ``OutputTooLong`` once more than ``limit_bytes`` UTF-8 bytes came out, ``TemplateRefusal``
        for whatever goes wrong in the template.
        """
        template, form = self._tool_use if request.tools else self._default
        messages = conform(request.messages, form)
        variables: dict[str, Any] = {**self._special_tokens, "documents": request.documents or None}
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
        variables.update(request.template_kwargs or {})
        variables["messages"] = messages
        variables["tools"] = request.tools or None
        variables["add_generation_prompt"] = not request.is_continuing
        if not request.is_continuing:
            return self._run(template, variables, limit_bytes)
        final = mark_final(messages, _FINAL_MARK)
        if final is None:
            raise TemplateRefusal("continue_final_message needs a last message from the assistant with text.")
        text = self._run(template, variables, limit_bytes + len(_FINAL_MARK))
        return _cut_at_mark(text, final)

    def _find_form(self, template: Template) -> ContentForm:
        takes_parts = self._shows_probe(template, [_PROBE_PART])
        takes_text = self._shows_probe(template, _PROBE)
        if not takes_parts:
            return ContentForm.TEXT
        return ContentForm.EITHER if takes_text else ContentForm.PARTS

    def _shows_probe(self, template: Template, content: Any) -> bool:
        """Whether a user message with ``content`` comes out as its text, not as a printed list."""
        user = {"role": "user", "content": content}
        for messages in ([user], [{"role": "system", "content": content}, user]):
            variables = {
                **self._special_tokens,
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
            }
            try:
                text = self._run(template, variables, _PROBE_BYTES)
            except (TemplateRefusal, OutputTooLong):
                continue
            if _PROBE in text and "meshd_probe_key" not in text:
                return True
        return False

    def _run(self, template: Template, variables: Mapping[str, Any], limit_bytes: int) -> str:
        pieces: list[str] = []
        left = limit_bytes
        self._environment.allow(_KEPT_FACTOR * limit_bytes + _KEPT_LEAST)
        try:
            for piece in template.generate(variables):
                left -= _length(piece)
                if left < 0:
                    raise OutputTooLong
                pieces.append(piece)
        except OutputTooLong:
            raise
        except MemoryError as exhausted:
            raise OutputTooLong from exhausted
        # A template is code of somebody else: whatever it raises is its refusal, not a fault of meshd.
        except Exception as error:
            raise TemplateRefusal(_told(error)) from error
        return "".join(pieces)


def _length(piece: str) -> int:
    return len(piece) if piece.isascii() else len(piece.encode(errors="replace"))


def _told(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text[:MESSAGE_BYTES].encode(errors="replace")[:MESSAGE_BYTES].decode(errors="ignore")


def _cut_at_mark(text: str, final: str) -> str:
    """Cut ``text`` after the content of the last message, so that the model goes on with it.

    A template may have trimmed the content with the mark behind it; then the text ends trimmed as well.
    """
    cut = text.rfind(_FINAL_MARK.strip())
    if cut < 0 or final.strip() not in text:
        raise TemplateRefusal("The chat template does not show the final message, so it cannot be continued.")
    return text[:cut] if text.startswith(_FINAL_MARK, cut) else text[:cut].rstrip()


# --- the environment that published templates expect ---


class _Collected(list[str]):
    """The text of a macro or block while it is collected, counted for all of them together."""

    __slots__ = ("_environment",)

    def __init__(self, environment: _Sandbox) -> None:
        super().__init__()
        self._environment = environment

    def append(self, piece: str) -> None:
        self._environment.keep(_length(piece))
        super().append(piece)

    def extend(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self.append(piece)


class _Generator(CodeGenerator):
    """Generates code that counts what is collected and what is joined by ``~``."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.collected()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.bounded(")
        super().visit_Concat(node, frame)
        self.write(")")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, which also refuses to build and to collect huge values."""

    intercepted_binops = frozenset(("*", "+"))
    code_generator_class = _Generator
    _most = 0
    _keepable = 0

    def allow(self, most: int) -> None:
        """Begin a rendering that may collect ``most`` bytes, and build values of that length."""
        self._most = self._keepable = most

    def collected(self) -> _Collected:
        return _Collected(self)

    def keep(self, length: int) -> None:
        self._keepable -= length
        if self._keepable < 0:
            raise OutputTooLong

    def bounded(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)) and len(value) > self._most:
            raise OutputTooLong
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return self.bounded(left + right)
        for repeated, times in ((left, right), (right, left)):
            is_repetition = isinstance(repeated, (str, list, tuple)) and isinstance(times, int)
            if is_repetition and len(repeated) * times > self._most:
                raise OutputTooLong
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # The default is a value that prints as nothing, which would hide an attempt to escape.
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe.")


class _GenerationExtension(Extension):
    """A ``{% generation %}`` block marks assistant output for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (the base declares it per instance)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, _GenerationExtension],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _raise_exception(text: Any = "") -> NoReturn:
    raise TemplateError(str(text))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
