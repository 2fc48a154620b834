"""The chat as a script of lines; tests/commands/test_chat.py has it in a terminal."""

import io
from pathlib import Path

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.compiling.report import CompileReport, GraphReport
from compiled_llm.terminal.chat import COMMANDS, Chat
from compiled_llm.terminal.engine_conversation import EngineConversation


@pytest.fixture
def talk(engine: CompiledEngine) -> EngineConversation:
    return EngineConversation(engine, {"temperature": 0, "max_tokens": 4}, lambda piece: print(piece, end=""))


def run(talk: EngineConversation, script: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    return Chat(talk, without=["n"]).run()


def test_lines_are_messages_and_commands(
    talk: EngineConversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "talk.jsonl"
    script = f"""
one \\
and two

/system be brief
/system
/set max-tokens 3
/set ignore_eos true
/set
/retry
/stats
/save {path}
/clear
/system none
/system
/exit
not read
"""
    assert run(talk, script, monkeypatch) == 0
    out, notes = capsys.readouterr()
    assert '"content": "one \\nand two"' in path.read_text()
    assert talk.messages == []
    assert talk.system is None
    assert talk.sampling == {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    for text in (
        "\nbe brief\n",
        "\nmax_tokens 3\nignore_eos True\n",
        "\nlast answer",
        f"2 messages in {path}\n",
        "\nnone\n",
    ):
        assert text in out
    assert "3 tokens in" in out
    assert notes.splitlines() == [
        "(cut at max_tokens=4: /set max_tokens 8, then /retry)",
        "(cut at max_tokens=3: /set max_tokens 6, then /retry)",
    ]


def test_stats_say_which_graphs_have_taken_over(
    talk: EngineConversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def graph(name: str, cache: str, took_over: float | None) -> GraphReport:
        return GraphReport(name, 1, 0, 0, 1.0, cache, 0, took_over=took_over)

    report = CompileReport((graph("step", "miss", 12.34), graph("sample", "pending", None)))
    monkeypatch.setattr(talk.engine, "compile_report", lambda: report)
    assert run(talk, "/stats", monkeypatch) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "compiled while the engine served: step at 12.3 s",
        "not compiled yet, so uncompiled: sample",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/hlep", "there is no command /hlep: did you mean '/help'?"),
        ("/qqq 1", "there is no command /qqq: /help lists them"),
        ("/save", "/save needs FILE"),
        ("/clear all", "/clear stands alone, given 'all'"),
        ("/set temperature", "/set needs NAME VALUE, as in /set temperature 0.2"),
        ("/set temprature 1", "there is no sampling parameter 'temprature': did you mean 'temperature'?"),
        ("/set n 2", "there is no sampling parameter 'n'"),
        ("/set top_k many", "top_k: invalid int value: 'many'"),
        ("/set ignore_eos 3", "ignore_eos must be true or false, given '3'"),
        ("/set top_p 3", "top_p must be a number from 0.0 to 1.0, given 3.0"),
        ("/retry", "there is no message to answer again"),
        ("/save /nowhere/at/all", "[Errno 2] No such file or directory: '/nowhere/at/all'"),
    ],
)
def test_what_cannot_be_done_is_told_and_the_script_goes_on(
    line: str, said: str, talk: EngineConversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(talk, f"{line}\n/system be brief", monkeypatch) == 1
    assert capsys.readouterr().err == f"(error: {said})\n"
    assert talk.system == "be brief"


def test_help_has_every_command(
    talk: EngineConversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(talk, "/help", monkeypatch) == 0
    out = capsys.readouterr().out
    assert all(f"/{name}" in out and command.text in out for name, command in COMMANDS.items())


def test_values_of_every_kind_can_be_set(talk: EngineConversation, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '/set stop END\n/set logit_bias {"3": 1.5}\n/set seed none\n/set bad_words a b\n/set stop_token_ids 1,2'
    assert run(talk, script, monkeypatch) == 0
    params = talk._params(9)
    assert (params.stop, params.logit_bias, params.seed) == (("END",), {3: 1.5}, None)
    assert (params.bad_words, params.stop_token_ids) == (("a b",), (1, 2))
