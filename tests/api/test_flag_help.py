"""The help of a program: a line for each of its most used flags."""

import pytest

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, add_sampling_arguments


def printed_help(parser: FlagParser, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args([flag])
    return capsys.readouterr().out


def made_parser() -> FlagParser:
    parser = FlagParser(prog="it", description="Does it.")
    parser.add_argument("text", nargs="?", help="what to do; none: nothing")
    parser.add_argument("shape", choices=("round", "square"))
    group = parser.add_argument_group("own flags")
    group.add_argument(
        "--file", metavar="FILE", required=True, help="a file that is read: text, and no more. It is not kept"
    )
    group.add_argument("--count", type=int, default=3, help="how often it is done (default: 3)")
    group.add_argument("--mode", choices=("slow", "fast"), help="how: and why")
    group.add_argument("--rare", action="store_true", help="never needed")
    parser.seldom.add("--rare")
    return parser


def test_a_line_for_each_flag_but_the_seldom_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert printed_help(made_parser(), "--help", capsys).splitlines() == [
        "usage: it [text] round|square --file FILE [FLAG ...]",
        "",
        "Does it.",
        "",
        "arguments:",
        "  [text]                    what to do",
        "  round|square",
        "",
        "own flags:",
        "  --file FILE               a file that is read: text, and no more",
        "  --count N                 how often it is done (3)",
        "  --mode NAME               how: slow, fast",
        "",
        "--help=all: 1 more flags, and all that is to be said of each flag",
    ]
    monkeypatch.setenv("COLUMNS", "60")
    assert "  --file FILE               a file that is read" in printed_help(made_parser(), "-h", capsys).splitlines()


def test_all_flags_are_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed_help(made_parser(), "--help=all", capsys)
    assert "never needed" in text
    assert "It is not kept" in text
    with pytest.raises(SystemExit, match="2"):
        made_parser().parse_args(["--help=al"])
    assert "argument -h/--help: must be one of all, given 'al': did you mean 'all'?" in capsys.readouterr().err


def test_the_most_used_arguments_come_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = FlagParser(prog="it")
    add_sampling_arguments(parser, max_tokens=64)
    add_engine_arguments(parser)
    lines = printed_help(parser, "--help", capsys).splitlines()
    assert lines[3:6] == [
        "sampling:",
        "  --max-tokens INT          most tokens to generate (64)",
        "  --temperature FLOAT       0 is greedy (1.0)",
    ]
    model = "  --model STR               directory, hub id or GGUF file of a checkpoint"
    assert lines[lines.index("engine:") + 1] == model
    assert "  --quantization STR        round weights of linear layers at load" in lines
    assert "  --[no-]enforce-eager      run the same functions without compiling, for..." in lines
    assert max(map(len, lines)) <= 80
