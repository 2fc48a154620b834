"""ChatTemplate against transformers' own rendering."""

from collections.abc import Callable, Iterator
from datetime import datetime
from threading import Thread
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from compiled_llm.text.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate, TemplateProcess
from tests.chat_templates import CONVERSATIONS, DOCUMENTS, TEMPLATES, TOOLS

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [{"role": "user", "content": "hello"}]
# (template, conversation): what a template does not expect, it refuses here as there.
REFUSED = [("chatml", "tool"), ("chatml", "parts"), ("inst", "system"), ("inst", "tool"), ("inst", "parts")]


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture
def render(process: TemplateProcess) -> Callable[..., str]:
    def render(source: str, max_characters: int = 10_000, **variables: Any) -> str:
        return ChatTemplate(source, process).render({"messages": MESSAGES, **variables}, max_characters)

    return render


def outcome(function: Any) -> tuple[str | None, str]:
    """(text, what an error says)."""
    try:
        return function(), ""
    except Exception as error:
        return None, str(error)


@pytest.mark.parametrize(
    "conversation", [name for name in CONVERSATIONS if name != "reasoning"]
)  # of which chat.py makes something else
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, conversation: str, process: TemplateProcess) -> None:
    messages = [{key: value for key, value in m.items() if value is not None} for m in CONVERSATIONS[conversation]]
    template = ChatTemplate(TEMPLATES[name], process)
    rendered = 0
    for tools in (None, TOOLS):
        for add_generation_prompt in (True, False):
            given = dict(tools=tools, documents=DOCUMENTS, add_generation_prompt=add_generation_prompt, **NAMED)

            def expected(given: dict[str, Any] = given) -> str:
                return render_jinja_template([messages], chat_template=TEMPLATES[name], **given)[0][0]

            text, refusal = outcome(expected)
            ours, reason = outcome(lambda given=given: template.render({"messages": messages, **given}, 100_000))
            assert ours == text
            assert refusal in reason
            rendered += text is not None
    assert rendered == (0 if (name, conversation) in REFUSED else 4)


def test_threads_may_share_a_template(process: TemplateProcess) -> None:
    template = ChatTemplate("{{ text }}{{ 'z' in text }}", process)
    wrong: list[Exception] = []

    def work(text: str, times: int) -> None:
        try:
            for _ in range(times):
                assert template.render({"text": text}, 2_000_000) == text + "False"
        except Exception as error:
            wrong.append(error)

    threads = [Thread(target=work, args=("x" * 1_000_000, 20)), Thread(target=work, args=("y", 500))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_time_is_todays(render: Callable[..., str]) -> None:
    before = datetime.now().strftime("%d %B %Y")
    assert render("{{ strftime_now('%d %B %Y') }}") in (before, datetime.now().strftime("%d %B %Y"))


def test_what_a_template_reads_and_what_is_written_in_it_are_known(process: TemplateProcess) -> None:
    source = "{% if enable_thinking %}<x>{{ messages[0].content.split('</think>') }}{% endif %}"
    template = ChatTemplate(source, process)
    assert template.names == {"enable_thinking", "messages"}
    assert template.literals == {"<x>", "content", "split", "</think>"}


def test_the_text_is_cut_off_at_no_place_but_refused_when_too_long(render: Callable[..., str]) -> None:
    source = "{% for i in range(100) %}0123456789{% endfor %}"
    assert len(render(source, max_characters=1000)) == 1000
    with pytest.raises(ValueError, match="chat template failed: it makes a text of more than 999 characters"):
        render(source, max_characters=999)


def test_json_leaves_marks_as_they_are(process: TemplateProcess) -> None:
    template = ChatTemplate("{{ messages[0].content | tojson(ensure_ascii=true) }}", process)
    text = template.render({"messages": [{"content": "é⠁🚀"}]}, 100, unescaped="⠁")
    assert text == '"\\u00e9⠁\\ud83d\\ude80"'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles: ' + messages[0].role) }}", "chat template refuses the messages: roles: user$"),
        ("{{ missing.attribute }}", "chat template failed: 'missing' is undefined$"),
        ("{{ 1 + 'a' }}", "chat template failed: TypeError: unsupported operand"),
        ("{{ 1 // 0 }}", "chat template failed: ZeroDivisionError"),
        ("{{ {'a': 1} | tojson(indent=-1) }}{{ undefined_name | tojson }}", "TypeError: Object of type Undefined"),
        ("x\n{% if %}", r"chat template cannot be compiled: Expected an expression.*\(line 2\)$"),
        ("{% for a in b %}", "chat template cannot be compiled: Unexpected end of template"),
        ("{{ 'a' | no_such_filter }}", r"cannot be compiled: No filter named 'no_such_filter'\.? \(line 1\)$"),
        ("x" * (MAX_TEMPLATE_CHARACTERS + 1), f"at most {MAX_TEMPLATE_CHARACTERS} characters, given 65537 characters"),
        (3, "must be a str of at most 65536 characters, given int"),
    ],
)
def test_every_failure_says_that_it_is_the_template(source: Any, message: str, render: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=message):
        render(source)


def test_long_conversations_are_within_what_rendering_may_cost(process: TemplateProcess) -> None:
    """Two thousand turns, and one message of a million characters, through the costliest of these templates."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"<think>a</think>{i}"} for i in range(2000)]
    for messages in (turns, [{"role": "user", "content": "a < b\n" * 200_000}]):
        given = {"messages": messages, "tools": TOOLS, "add_generation_prompt": True}
        text = ChatTemplate(TEMPLATES["chatml-tools"], process).render(given, 10_000_000)
        assert len(text) > sum(len(message["content"]) for message in messages) // 2


def test_what_crosses_over_stays_as_it_is(render: Callable[..., str]) -> None:
    """Halves of surrogate pairs, signs of control, the order of keys, and numbers."""
    value = {"z": "\ud800\x00é🚀\u2028", "a": [1.5e300, -0.0, 2**70, True, None, {}]}
    assert render("{{ value }}", value=value) == str(value)


def test_what_jinja_reads_from_disk_when_it_first_needs_it_is_there(render: Callable[..., str]) -> None:
    """The process in which templates run can open no file."""
    source = "{{ '<b>x&amp;\\xe9 y' | striptags | urlize | wordwrap(3) | center(9) | pprint }}"
    assert render(source) == r"""'x&a\nmp;\né y'"""
    assert len(render("{{ lipsum(1) }}")) > 100
    for failing in ("{{ 'x' | float(default=raise_exception('no')) }}", "{{ a.b }}", "{{ 1 + 'x' }}", "{% if %}"):
        with pytest.raises(ValueError, match=r"^the chat template (?!.*(OSError|open files))"):
            render(failing)
