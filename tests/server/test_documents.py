"""What docs/serving.md tells a newcomer to type works with a server: curl, and OpenAI's library."""

import json
import shlex
import subprocess
from typing import Any

import pytest

from compiled_llm.server.settings import ServerSettings
from tests.docs.markdown import ROOT, blocks, statements
from tests.server.conftest import Running

PAGE = ROOT / "docs" / "serving.md"
URL = f"http://127.0.0.1:{ServerSettings.port}"


def test_the_commands_of_curl(running: Running) -> None:
    commands = [each for block in blocks(PAGE, "bash") for each in statements(block) if each.startswith("curl ")]
    chat, stream, score = (
        subprocess.run(
            shlex.split(command.replace(URL, running.url)), capture_output=True, check=True, text=True
        ).stdout
        for command in commands
    )
    assert json.loads(chat)["usage"]["completion_tokens"] == 24
    assert stream.endswith("data: [DONE]\n\n")
    likely, unlikely = (one["score"] for one in json.loads(score)["data"])
    assert likely > unlikely


def snippet(word: str) -> str:
    """The first one with it."""
    return next(block.text for block in blocks(PAGE, "python") if word in block.text)


@pytest.mark.parametrize(
    ("word", "greedy"), [("chat.completions", "temperature=0"), ("messages.stream", 'extra_body={"temperature": 0}')]
)
def test_a_snippet_prints_one_answer_twice(
    word: str, greedy: str, running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    text = snippet(word).replace(URL, running.url).replace("max_tokens=24", f"max_tokens=24, {greedy}")
    exec(compile(text, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    half = len(printed) // 2
    assert printed[:half] + "\n" + printed[:half] == printed


def test_the_snippet_of_responses_goes_on_with_the_first(running: Running) -> None:
    variables: dict[str, Any] = {}
    exec(compile(snippet("responses.create").replace(URL, running.url), str(PAGE), "exec"), variables)
    first, second = variables["first"], variables["second"]
    assert (second.previous_response_id, second.usage.output_tokens) == (first.id, 24)


def test_every_flag_of_the_server_that_the_page_names_is_there() -> None:
    from compiled_llm.bench.serve import parser as load
    from compiled_llm.bench.servers import parser as beside
    from compiled_llm.commands.chat import parser as chat
    from compiled_llm.commands.serve import parser

    flags = set().union(*(each("it")._option_string_actions for each in (parser, load, beside, chat)))
    before, _, others = PAGE.read_text().partition("## Clients it was tried with")  # which have flags of their own
    words = (before + others.partition("\n## ")[2]).split()
    named = {word.strip("`.,;:()") for word in words if word.strip("`(").startswith("--")}
    assert {flag.partition("`")[0] for flag in named} <= flags
