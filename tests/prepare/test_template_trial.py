from __future__ import annotations

import pytest

from meshd.prepare.chat_messages import ContentForm
from meshd.prepare.chat_template import ChatRequest
from meshd.prepare.template_trial import TemplateUnfit, try_template

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
USER = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


def test_a_template_that_passes_is_what_the_child_found_it_to_be() -> None:
    by_parts = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    template = try_template({"default": "{{ messages[0].content }}", "tool_use": by_parts}, {})
    assert template.render(ChatRequest([USER]), 100) == "a b"
    assert template.render(ChatRequest([USER], tools=[{}]), 100) == "[a][b]"


def test_a_template_that_does_not_compile_is_told_why() -> None:
    with pytest.raises(TemplateUnfit, match="does not compile: TemplateSyntaxError"):
        try_template({"default": "{% for %}"}, {})


@pytest.mark.parametrize("source", [LOOPS, "{{ 10 ** (10 ** 9) }}", "{% set n = 10 %}{{ n ** (n ** n) }}"])
def test_a_template_that_comes_to_no_end_is_given_up_in_time(source: str) -> None:
    with pytest.raises(TemplateUnfit, match="cannot be tried"):
        try_template({"default": source}, {}, timeout_s=0.5)


def test_a_template_that_takes_all_memory_does_not_get_it() -> None:
    source = "{{ 'x'.ljust(9000000000) | length }}{{ messages[0].content }}"
    template = try_template({"default": source}, {})
    assert template.forms[0] is ContentForm.TEXT  # no probe came to an end, and nobody was harmed
