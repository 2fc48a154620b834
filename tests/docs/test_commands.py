"""Every shell command of the documents is run word for word, or at least taken by the parser of its script.

In a directory that looks like the repository's root, with the demo model where the documents say ``DIR``.
"""

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.__main__ import main
from compiled_llm.commands import module_of
from compiled_llm.commands.bench import BENCHES
from compiled_llm.commands.completion import all_commands
from tests.docs.commands import SCRIPTS, is_expensive, not_run, options_of, parse_command, words_of
from tests.docs.markdown import DOCUMENTS, ROOT, blocks, inline_code, name_of, statements

DEMO_MODEL = ROOT / "compiled_llm" / "demo_model"
SECONDS = 600
RECORDS = ("CHANGELOG.md", "docs/log.md")  # which name programs of their time


@functools.cache
def commands(path: Path) -> list[str]:
    return [statement for block in blocks(path, "bash") for statement in statements(block)]


def runnable(path: Path) -> list[str]:
    """What is run of a document, in its order; not what another document before it says in the same words."""
    before = {
        plain(statement)
        for other in DOCUMENTS[: DOCUMENTS.index(path)]
        for statement in commands(other)
        if not_run(statement) is None
    }
    return [each for each in commands(path) if not_run(each) is None and plain(each) not in before]


def plain(statement: str) -> str:
    return statement.removeprefix(".venv/bin/")


def make_root(directory: Path) -> dict[str, str]:
    """Make ``directory`` look like the repository's root; returns the environment to run in."""
    for path in ROOT.iterdir():
        if path.name in ("compiled_llm", "scripts", "ops", "models", "tests", "README.md", "pyproject.toml"):
            (directory / path.name).symlink_to(path)
    (directory / "DIR").symlink_to(DEMO_MODEL)
    programs = directory / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text("")  # PATH is set already
    for name in ("python", "python3"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "compiled-llm").write_text(f'#!/bin/sh\nexec {sys.executable} -m compiled_llm "$@"\n')
    (programs / "compiled-llm").chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


def run(path: Path, directory: Path, expensive: bool) -> None:
    """Run a document's commands one after the other. Those that are ``expensive`` need those before them too.

    README's are run as they are typed. Of other documents, a command of ours without a shell's signs is run in this
    process, which has imported torch already.
    """
    environment = make_root(directory)
    for statement in runnable(path):
        if is_expensive(statement) and not expensive:
            parse_command(words_of(statement))
            continue
        words = list(shlex.shlex(statement, posix=True, punctuation_chars="|<>$"))
        if path.name != "README.md" and statement.startswith("compiled-llm ") and not {*"|<>$"} & {*words}:
            run_here(shlex.split(statement)[1:], directory)
            continue
        command = ["bash", "-euo", "pipefail", "-c", statement]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, f"{name_of(path)}: {statement}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert "Traceback" not in done.stderr, f"{name_of(path)}: {statement}\n{done.stderr[-4000:]}"


def run_here(words: list[str], directory: Path) -> None:
    """Run ``compiled-llm`` with these words; the handlers of signals are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.chdir(directory):
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert status == 0, words


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if runnable(path)], ids=name_of)
def test_commands_run(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path, expensive=False)


@pytest.mark.battery
@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if any(is_expensive(each) for each in runnable(path))], ids=name_of
)
def test_expensive_commands_run(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path, expensive=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_that_are_not_run_would_start(path: Path) -> None:
    for statement in commands(path):
        kind = not_run(statement)
        if kind is not None:
            kind.check(words_of(statement))


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if name_of(path) not in RECORDS], ids=name_of)
def test_commands_in_the_text_would_start(path: Path) -> None:
    for span in inline_code(path):
        kind = not_run(span)
        if kind is not None:
            kind.check(words_of(span))
        elif re.match(r"(python scripts/|compiled-llm [a-z][a-z -]+ --)", span) and "|" not in span:
            parse_command(words_of(span))
        elif re.match(r"scripts/\w+\.py ", span):
            parse_command(["python", *words_of(span)])
        for script in re.findall(r"(?:tests/)?scripts/\w+\.py", span):
            assert (ROOT / script).is_file(), f"{name_of(path)}: {span}"


@pytest.fixture(scope="module")
def known_options() -> set[str]:
    of_commands = (flag.names for command in all_commands("compiled_llm.commands") for flag in command.flags)
    benches = (module_of("compiled_llm.bench", name).parser(name)._option_string_actions for name in BENCHES)
    return set().union(*map(options_of, SCRIPTS), *of_commands, *benches)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if name_of(path) not in RECORDS], ids=name_of)
def test_flags_in_the_text_are_known_to_some_program(path: Path, known_options: set[str]) -> None:
    for span in inline_code(path):
        for flag in re.findall(r"(?:^|\s)(--[a-z][a-z-]*)", span if span.startswith("--") else ""):
            assert flag in known_options, f"{name_of(path)}: `{span}`"


def test_a_command_that_would_not_start_is_found() -> None:
    with pytest.raises(AssertionError, match="is refused"):
        parse_command(["compiled-llm", "bench", "products", "--no-such-flag"])
    with pytest.raises(AssertionError, match="is refused"):
        parse_command(["compiled-llm", "batch", "--no-such-flag"])
    with pytest.raises(AssertionError, match="is not there"):
        parse_command(["python", "scripts/no_such_script.py"])
