"""A chat template is tried in a child before a leader takes it.

It is foreign code, and to load it is to run it: compiling works out its constants, and how it reads content
is found by rendering probes. ``10 ** (10 ** 9)`` is one step of the interpreter that nothing can interrupt, a
loop in a loop takes hours, and a long row of nested blocks may overflow the stack. A leader must not be lost
to any of these, because the next one would load the same template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from meshd.prepare.chat_messages import ContentForm
from meshd.prepare.chat_template import ChatTemplate
from meshd.prepare.child_answers import NoAnswer, answers_of_child
from meshd.prepare.memory_bound import bound_data, data_bytes

TRIAL_S: Final = 20.0
"""Real templates take a twentieth of a second; the rest is for a busy machine."""

_TRIAL_BYTES: Final = 1 << 30


class TemplateUnfit(Exception):
    """The template does not compile, or did not survive its trial; the text says which."""


def try_template(
    sources: Mapping[str, str], special_tokens: Mapping[str, Any], timeout_s: float = TRIAL_S
) -> ChatTemplate:
    """Return the compiled template. Call it in a process without threads. Raises ``TemplateUnfit``."""

    def work() -> tuple[str, ...]:
        bound_data(data_bytes() + _TRIAL_BYTES)
        try:
            forms = ChatTemplate(sources, special_tokens).forms
        except Exception as error:
            return ("", f"it does not compile: {type(error).__name__}: {error}")
        return ("ok", *(form.value for form in forms))

    try:
        told, *answers = answers_of_child(work, timeout_s)
    except NoAnswer as broken:
        raise TemplateUnfit(f"it cannot be tried: {broken}") from broken
    if told != "ok":
        raise TemplateUnfit(answers[0])
    default, tool_use = map(ContentForm, answers)
    return ChatTemplate(sources, special_tokens, forms=(default, tool_use))
