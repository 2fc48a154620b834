"""All commands alike: short help that comes at once, completion, errors of three lines."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm.__main__ import main
from compiled_llm.api.command_line import FlagParser
from compiled_llm.commands import COMMANDS, commands_of, module_of
from compiled_llm.commands.bench import BENCHES


def parsers(package: str = "compiled_llm.commands", words: tuple[str, ...] = ()) -> Iterator[FlagParser]:
    for name in commands_of(package):
        module = module_of(package, name)
        if hasattr(module, "COMMANDS"):
            yield from parsers(module.__name__, (*words, name))
        else:
            yield module.parser(" ".join(("compiled-llm", *words, name)))


def benches() -> Iterator[FlagParser]:
    for name in BENCHES:
        yield module_of("compiled_llm.bench", name).parser(f"compiled-llm bench {name}")


@pytest.mark.parametrize("parser", [*parsers(), *benches()], ids=lambda parser: parser.prog)
def test_help_is_at_most_40_lines(
    parser: FlagParser, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith(f"usage: {parser.prog}")
    assert parser.description in lines
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["--help=all"])
    everything = capsys.readouterr().out
    for action in parser._actions:
        assert action.help, f"{parser.prog} {action.dest} has no help"
        assert all(option in everything for option in action.option_strings)
    assert parser.seldom <= set(parser._option_string_actions)


def test_help_and_completion_load_no_torch() -> None:
    """So they come at once, wherever Tab is pressed."""
    code = """
import sys
from compiled_llm.__main__ import main
assert main(["--help"]) == main(["completion", "zsh"]) == 0
try:
    main(["batch", "--help"])
except SystemExit as end:
    assert not end.code
assert not {"torch", "transformers", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_help_of_the_program_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert f"  {name:12}{text}\n" in out
    assert len(out.splitlines()) <= 40
    assert main([]) == 2
    assert capsys.readouterr() == ("", out)


def test_the_document_of_commands_has_a_row_for_each() -> None:
    document = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    assert [name for name in COMMANDS if f"\n| [`{name}`](" not in document] == []


def test_completion_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    out = capsys.readouterr().out
    assert all(parser.prog.removeprefix("compiled-llm ") in out for parser in parsers())


def test_a_wrong_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in ((["btach", "--n"], "'btach': did you mean 'batch'?"), (["qwertz"], "'qwertz'")):
        assert main(given) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"compiled-llm: error: the command must be one of {', '.join(COMMANDS)}, given {said}",
            f"  given: {' '.join(given)}",
            "  see:   compiled-llm --help",
        ]


def test_version_says_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows.keys() >= {"compiled-llm", "torch", "triton", "python", "CPU", "instruction set", "GPU", "cache"}
    assert all(text.strip() for text in rows.values())
