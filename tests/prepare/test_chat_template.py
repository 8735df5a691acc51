from __future__ import annotations

from datetime import datetime

import jinja2
import pytest

from meshd.prepare.chat_template import ChatRequest, ChatTemplate, OutputTooLong, TemplateRefusal

LIMIT = 1 << 20
USER = {"role": "user", "content": "Hi"}
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(source, *messages, limit=LIMIT, special=None, **request):
    template = ChatTemplate({"default": source}, special or {}, lambda: datetime(2024, 2, 29))
    return template.render(ChatRequest(messages or (USER,), **request), limit)


def test_a_published_style_template_renders_the_conversation_and_the_generation_prompt():
    text = render(CHATML, {"role": "system", "content": "S"}, USER)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_and_loops_can_break_and_continue():
    source = (
        "{% for i in range(9) %}\n"
        "    {% if i == 1 %}\n{% continue %}\n    {% endif %}\n"
        "    {% if i == 3 %}{% break %}{% endif %}\n"
        "{{ i }}\n"
        "{% endfor %}"
    )
    assert render(source) == "0\n2\n"


def test_generation_blocks_are_rendered_as_their_content():
    source = (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ messages[0].content }}]{% endgeneration %}{{ x }}"
    )
    assert render(source) == "[Hi]1"


def test_tojson_keeps_non_ascii_and_html_and_takes_an_indent():
    source = "{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}"
    assert render(source, tools=[{"é": "<&'>"}]) == '[{"é": "<&\'>"}]|{\n  "é": "<&\'>"\n}'


def test_undefined_names_render_empty_and_special_tokens_are_defined():
    assert render("[{{ bos_token }}{{ nothing }}{{ eos_token }}]", special={"bos_token": "<s>"}) == "[<s>]"


def test_the_date_comes_from_the_clock_given():
    assert render("{{ strftime_now('%d %b %Y') }}") == "29 Feb 2024"


def test_tools_and_documents_are_none_when_absent():
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ documents[0] }}", documents=["d"]) == "d"


def test_template_kwargs_win_over_reasoning_effort_but_never_over_the_conversation():
    source = "{{ reasoning_effort }} {{ messages | length }} {{ tools is none }} {{ add_generation_prompt }}"
    kwargs = {"reasoning_effort": "high", "messages": [], "tools": [1], "add_generation_prompt": False}
    assert render(source, reasoning_effort="low") == "low 1 True True"
    assert render(source, reasoning_effort="low", template_kwargs=kwargs) == "high 1 True True"


def test_a_template_for_tools_is_used_when_the_request_has_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(ChatRequest([USER]), LIMIT) == "plain"
    assert template.render(ChatRequest([USER], tools=[{}]), LIMIT) == "tools"
    only_default = ChatTemplate({"default": "plain"}, {})
    assert only_default.render(ChatRequest([USER], tools=[{}]), LIMIT) == "plain"


def test_a_template_that_does_not_compile_is_refused_at_load():
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate({"default": "{% for %}"}, {})
    with pytest.raises(ValueError):
        ChatTemplate({}, {})


# --- content: string or parts ---

TAKES_TEXT = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
PRINTS = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
PRINTS_JSON = "{% for m in messages %}<{{ m.content | tojson }}>{% endfor %}"
LOOPS = "{% for m in messages %}{% for p in m.content %}<{{ p.type }}:{{ p.text }}>{% endfor %}{% endfor %}"
TAKES_BOTH = (
    "{% for m in messages %}{% if m.content is string %}S{{ m.content }}{% else %}"
    "{% for p in m.content %}P{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
WANTS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + LOOPS
TWO_PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


@pytest.mark.parametrize("source", [TAKES_TEXT, PRINTS])
def test_a_template_that_reads_strings_gets_parts_joined(source):
    assert render(source, TWO_PARTS, USER) == "<a b><Hi>"


def test_a_template_that_prints_content_as_json_gets_a_string():
    assert render(PRINTS_JSON, TWO_PARTS) == '<"a b">'


def test_a_template_that_loops_over_parts_gets_parts():
    assert render(LOOPS, TWO_PARTS, USER) == "<text:a><text:b><text:Hi>"


def test_a_template_that_takes_both_gets_what_the_client_sent():
    assert render(TAKES_BOTH, TWO_PARTS, USER) == "PaPbSHi"


def test_a_template_that_insists_on_a_system_message_is_probed_with_one():
    assert render(WANTS_SYSTEM, {"role": "system", "content": "s"}, TWO_PARTS) == "<text:s><text:a><text:b>"


# --- continue_final_message ---

REPLY = {"role": "assistant", "content": " so far "}
TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"


def test_the_output_is_cut_after_the_content_of_the_final_message():
    text = render(CHATML, USER, REPLY, is_continuing=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n so far "


def test_the_output_is_cut_after_the_trimmed_content_of_a_template_that_trims():
    assert render(TRIMS, USER, REPLY, is_continuing=True) == "[user]Hi<end>[assistant]so far"


def test_the_last_occurrence_of_a_repeated_text_is_where_it_continues():
    same = {"role": "assistant", "content": "Hi"}
    assert render(TRIMS, USER, same, is_continuing=True) == "[user]Hi<end>[assistant]Hi"


def test_a_short_reply_is_not_mistaken_for_the_letters_of_the_markup_behind_it():
    for content in ("e", "end", "", "<"):
        reply = {"role": "assistant", "content": content}
        assert render(TRIMS, USER, reply, is_continuing=True) == f"[user]Hi<end>[assistant]{content}"


def test_a_reply_at_exactly_the_limit_can_be_continued():
    whole = "[user]Hi<end>[assistant]so far"
    ends = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<end>' if not loop.last }}{% endfor %}"
    reply = {"role": "assistant", "content": "so far"}
    assert render(ends, USER, reply, is_continuing=True, limit=len(whole)) == whole
    with pytest.raises(OutputTooLong):
        render(ends, USER, reply, is_continuing=True, limit=len(whole) - 1)


@pytest.mark.parametrize("last", [USER, {"role": "assistant", "content": None}])
def test_only_text_of_the_assistant_can_be_continued(last):
    with pytest.raises(TemplateRefusal, match="continue_final_message"):
        render(PRINTS, last, is_continuing=True)


def test_a_final_message_that_the_template_hides_cannot_be_continued():
    with pytest.raises(TemplateRefusal, match="final message"):
        render("nothing", REPLY, is_continuing=True)


# --- failures ---


def test_raise_exception_is_a_refusal_with_its_text():
    with pytest.raises(TemplateRefusal, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_long_refusal_is_cut_to_512_bytes():
    with pytest.raises(TemplateRefusal) as refusal:
        render("{{ raise_exception('é' * 1000) }}")
    assert str(refusal.value) == "é" * 256


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% include 'x' %}",
    ],
)
def test_an_attempt_to_leave_the_sandbox_is_a_refusal(source):
    with pytest.raises(TemplateRefusal):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ nothing.more }}", "{{ 'a' + 1 }}", "{{ messages[0]() }}"]
)
def test_a_run_time_error_is_a_refusal(source):
    with pytest.raises(TemplateRefusal):
        render(source)


def test_output_of_exactly_the_limit_passes_and_one_byte_more_does_not():
    assert render("{{ messages[0].content }}é", limit=4) == "Hié"
    with pytest.raises(OutputTooLong):
        render("{{ messages[0].content }}é", limit=3)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{{ messages[0].content * 2000000000 }}",
        "{{ 2000000000 * messages[0].content }}",
        "{{ messages * 2000000000 }}",
    ],
)
def test_a_template_that_multiplies_its_output_is_stopped_early(source):
    with pytest.raises(OutputTooLong):
        render(source, limit=1000)


LONG = {"role": "user", "content": "x" * 10_000}
LOOP = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
DOUBLES = "{% set ns = namespace(x=messages[0].content, y=messages) %}{% for i in range(64) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% set x %}" + LOOP + "{% endset %}",
        "{% macro m() %}" + LOOP + "{% endmacro %}{{ m() | length }}",
        "{% filter length %}" + LOOP + "{% endfilter %}",
        DOUBLES + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        DOUBLES + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        DOUBLES + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
    ],
)
def test_what_a_template_keeps_without_writing_it_is_bounded_too(source):
    with pytest.raises(OutputTooLong):
        render(source, LONG, limit=1000)


def test_what_one_rendering_kept_does_not_count_against_the_next():
    source = (
        "{% set x %}{% for i in range(900) %}{{ 'abcdefghij' * 10 }}{% endfor %}{% endset %}{{ x | length }}"
    )
    template = ChatTemplate({"default": source}, {})
    for _ in range(30):
        assert template.render(ChatRequest((USER,)), 1000) == "90000"
