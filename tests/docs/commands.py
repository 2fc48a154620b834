"""What a shell command of the documents is, and how it is checked where it is not run."""

import argparse
import contextlib
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

from compiled_llm.api.command_line import FlagParser
from tests.docs.markdown import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = sorted(str(path.relative_to(ROOT / "scripts")) for path in (ROOT / "scripts").glob("**/*.py"))


class _ParsedError(Exception):
    """The script has got as far as its arguments."""


def _until_parsed(path: Path, arguments: list[str], see: Callable[[argparse.ArgumentParser], object]) -> None:
    """Run the program at ``path`` until it has parsed its arguments; ``see`` gets the parser before. Nothing else runs.

    Raises:
        SystemExit: the parser refuses the arguments.
    """

    def stopping(parse_args: Callable) -> Callable:
        def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
            see(self)
            parse_args(self, args, namespace)
            raise _ParsedError

        return stop

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        patch.setattr(sys, "argv", [str(path), *arguments])
        for kind in (argparse.ArgumentParser, FlagParser):
            patch.setattr(kind, "parse_args", stopping(vars(kind)["parse_args"]))
        with pytest.raises(_ParsedError):
            runpy.run_path(str(path), run_name="__main__")


def parse_command(words: list[str]) -> None:
    """``python scripts/X.py ARGUMENTS`` or ``compiled-llm ARGUMENTS``: the parser of this program takes the arguments.

    ``AssertionError`` if it does not, or if there is no such program.
    """
    if words[0] == "compiled-llm":
        program, arguments = ROOT / "compiled_llm" / "__main__.py", words[1:]
    else:
        assert re.fullmatch(r"scripts/\w+\.py", words[1]), words
        program, arguments = ROOT / words[1], words[2:]
        assert program.is_file(), f"{words[1]} is not there"
    try:
        _until_parsed(program, arguments, lambda parser: None)
    except SystemExit as refused:
        raise AssertionError(f"{' '.join(words)} is refused: see stderr") from refused


def options_of(script: str) -> set[str]:
    """The flags that a script knows; empty for a module that is no command."""
    options: set[str] = set()
    path = ROOT / "scripts" / script
    text = path.read_text()
    if "__main__" in text and any(name in text for name in ("parse_arg", "parse_checked", "commands.")):
        with contextlib.suppress(SystemExit):  # arguments that it requires are not given
            _until_parsed(path, [], lambda parser: options.update(parser._option_string_actions))
    return options


def check_pip(words: list[str]) -> None:
    """``pip install REQUIREMENT...``: each is well-formed; of this project, only extras that it has."""
    assert words[1] in ("install", "uninstall", "download"), words
    arguments = words[2:]
    while arguments:
        word = arguments.pop(0)
        if word == "-c":
            assert (ROOT / arguments[0]).is_file(), words
            arguments.pop(0)
            continue
        if word.startswith("-"):
            assert word in ("-e", "-y", "--no-deps"), f"{word} of {words}"
            continue
        requirement = Requirement(re.sub(r"^\.", "compiled-llm", word))
        if requirement.name == PROJECT["project"]["name"]:
            assert requirement.extras <= PROJECT["project"]["optional-dependencies"].keys(), words


def check_pytest(words: list[str]) -> None:
    """``pytest ARGUMENTS``: its paths are there, and its markers are known."""
    arguments = words[words.index("pytest") + 1 :]
    markers = " ".join(PROJECT["tool"]["pytest"]["ini_options"]["markers"])
    while arguments:
        word = arguments.pop(0)
        if word == "-m":
            assert f"{arguments.pop(0)}:" in markers, words
        elif word == "-k":
            arguments.pop(0)
        elif not word.startswith("--"):
            assert (ROOT / word).exists(), f"{word} of {words}"


def check_nothing(words: list[str]) -> None:
    """For programs that are not ours."""


class NotRun(NamedTuple):
    """Commands that are checked but not run. ``pattern``: of the whole statement."""

    pattern: str
    reason: str
    check: Callable[[list[str]], None]


_UNSET = r"env (-u \w+ )+"
_PYTHON = rf"({_UNSET})?(\S*/)?python"
_COMMAND = rf"({_UNSET})?(\S*/)?compiled-llm"
_BATCH = rf"(({_UNSET})?(\S*/)?compiled-llm batch|{_PYTHON} scripts/serve_offline\.py)"
NOT_RUN = (
    NotRun(_BATCH + r"\b.* --ray\b.*", "tests/offline/test_ray_workers.py runs clusters of its own", parse_command),
    NotRun(_PYTHON + r" scripts/serve_ray_data\.py\b.*", "tests/offline/test_ray_data.py runs it", parse_command),
    NotRun(
        _PYTHON + r" scripts/serve_offline.py .*--sliding-window .*",
        "tests/e2e/test_streams.py runs such an engine on a smaller model",
        parse_command,
    ),
    NotRun(_PYTHON + r"[\d.]* -m venv \S+", "a directory of its own is made by CI (.ci/run)", check_nothing),
    NotRun(r"(\S*/)?pip ((un)?install|download) .+", "needs the network; CI installs the project (.ci/run)", check_pip),
    NotRun(
        r"CXX=\S+ _PYTHON_HOST_PLATFORM=\S+ pip wheel \. --no-deps",
        "compiles for minutes; tests/test_packaging.py runs it",
        check_nothing,
    ),
    NotRun(r"unzip -j \S+\.whl .+", "what pip would download", check_nothing),
    NotRun(
        _COMMAND + r" (merge-lora \S|\S.* --(enable-lora|lora)\b).*",
        "needs adapters; tests/adapters, tests/offline and tests/exact run it",
        parse_command,
    ),
    NotRun(
        _COMMAND + r" \S.* --tensor-parallel-size \d.*", "tests/parallel runs engines with several ranks", parse_command
    ),
    NotRun(_COMMAND + r" chat \S+\.gguf", "needs that file; tests/e2e/test_gguf.py reads smaller ones", parse_command),
    NotRun(r"(sudo )?apt(-get)? install .+", "changes the machine", check_nothing),
    NotRun(rf"({_PYTHON} -m )?pytest\b.*", "would run this test in itself", check_pytest),
    NotRun(r"\.venv/bin/(ruff|mypy)\b.*", "CI runs them on the repository (.ci/run)", check_nothing),
    NotRun(_COMMAND + r" plan \S.*", "simulates for minutes; tests/commands/test_plan.py does less", parse_command),
    NotRun(rf"({_UNSET})?compiled-llm bench \S.*", "needs a quiet machine, and up to an hour", parse_command),
    NotRun(_COMMAND + r" (compile --shape|report (kv-cache|weights)) .*", "minutes", parse_command),
    NotRun(_COMMAND + r" report lm-eval .*", "needs lm-eval, and its tasks the network", parse_command),
    NotRun(_COMMAND + r" drain .*", "needs a server; tests/server/test_roles.py runs it", parse_command),
    NotRun(_COMMAND + r" serve\b.*", "serves until it is ended; tests/server/test_run.py runs it", parse_command),
    NotRun(r"serve deploy \S+", "Ray Serve's; tests/ray_serve/test_on_a_cluster.py gives it files", check_nothing),
    NotRun(r"curl .*", "tests/server/test_documents.py sends it to a server", check_nothing),
    NotRun(r"llm .*", "tests/server/test_documents.py runs it with a server", check_nothing),
    NotRun(r"printf .* chat --url .*", "tests/server/test_documents.py runs it with a server", parse_command),
    NotRun(_COMMAND + r" quantize .*", "tests/quantizing/test_quantize.py runs it", parse_command),
    NotRun(_PYTHON + r" scripts/gpu_validate\.py\b.*", "needs a GPU", parse_command),
    NotRun(_PYTHON + r" scripts/make_(docs|known_classes)\.py\b.*", "writes into the repository", parse_command),
    NotRun(
        _PYTHON + r" scripts/short_memory\.py\b.*",
        "may need root; tests/scripts/test_short_memory.py runs it",
        parse_command,
    ),
    NotRun(_PYTHON + r" scripts/train_demo_model\.py\b.*", "25 minutes", parse_command),
)  # fmt: skip
# Run with -m battery; else checked only.
EXPENSIVE = (
    _COMMAND + r" (exact|compile|tune (buckets|quantization|speculation)|report run)\b.*",
    _BATCH
    + r"\b.* --(report|trace|mode|workers) .*",  # the last ones compile graphs of their own; workers take two cores
    r"compiled-llm check .*--compare\b.*",
    # These start like those beside them; tests/offline, tests/commands and tests/e2e test what the flags do.
    r"compiled-llm generate .* --speculative-config .*",
    r"compiled-llm generate .* --(tensor|pipeline)-parallel-size .*",
    r"compiled-llm batch --input compiled_llm/demo_model/prompts\.jsonl .*",
    _BATCH + r"\b.* --(check|retry-errors) .*",
    r"(cat \S+ \| )?" + _BATCH + r"\b.* --input (-|\S+ \S+\.gz) .*",
    r"compiled-llm batch --bucket-sizes 1,8,32",
    r"compiled-llm batch --input requests\.jsonl .*",
    r"printf [^|]*\| compiled-llm (generate|chat) .*",
    r"compiled-llm generate \"[^\"]*\"( --max-tokens .*| --model DIR --weights-path KEPT)?",
    _COMMAND + r" report perplexity\b.*",
)


def not_run(statement: str) -> NotRun | None:
    """Why a statement is not run by any test; None if one does."""
    return next((kind for kind in NOT_RUN if re.fullmatch(kind.pattern, statement)), None)


def is_expensive(statement: str) -> bool:
    return any(re.fullmatch(pattern, statement) for pattern in EXPENSIVE)


def words_of(statement: str) -> list[str]:
    """As a shell splits it, without variables set or unset in front of the command; of a pipe, the last command."""
    words = shlex.split(re.sub(rf"^{_UNSET}", "", statement))
    words = words[len(words) - words[::-1].index("|") :] if "|" in words else words
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words
