"""What the completion scripts offer, asked of the shells themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest

from compiled_llm.api.command_line import FlagParser, add_engine_arguments
from compiled_llm.terminal.shell_completion import SHELLS, Command, completion_script


def commands() -> list[Command]:
    serve = FlagParser(prog="tool serve")
    serve.add_argument("--mode", choices=("fast", "slow"), help="how: it's [one] of two")
    serve.add_argument("--input", metavar="FILE", help="what")
    serve.add_argument("--count", type=int)
    add_engine_arguments(serve, "kv_cache_dtype")
    serve.add_argument("--quiet", action="store_true", help="print nothing")
    shell = FlagParser(prog="tool bench shell")
    shell.add_argument("shell", choices=("bash", "zsh"))
    return [
        Command((), {"serve": "serve files", "bench": "measure it's speed"}),
        Command.of(("serve",), serve),
        Command(("bench",), {"shell": "a shell"}),
        Command.of(("bench", "shell"), shell),
    ]


CASES = [
    ("tool ", {"serve", "bench"}),
    ("tool se", {"serve"}),
    ("tool bench ", {"shell"}),
    ("tool bench shell z", {"zsh"}),
    ("tool serve --", {"--mode", "--input", "--count", "--quiet", "--kv-cache-dtype", "--help"}),
    ("tool serve --quiet --mo", {"--mode"}),
    ("tool serve --mode ", {"fast", "slow"}),
    ("tool serve --input some", {"some file.txt"}),
    ("tool serve --count ", set()),
    ("tool serve --kv-cache-dtype ", {"auto", "float32", "bfloat16", "float16", "int8", "fp8"}),
]


@pytest.mark.parametrize(
    ("line", "offered"), [*CASES, ("tool serve --mode=f", {"fast"}), ("tool serve --mode=", {"fast", "slow"})]
)
def test_bash(line: str, offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "some file.txt").touch()
    # bash itself splits at "=" before it calls the function.
    words = line.replace("=", " = ").split(" ")
    words = [word for word in words[:-1] if word] + words[-1:]
    script = "\n".join(
        [
            completion_script("bash", "tool", commands()),
            "complete -p tool >/dev/null || exit 3",
            'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tool; printf "%s\\n" "${COMPREPLY[@]}"',
        ]
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(filter(None, done.stdout.splitlines())) == offered
    assert done.stderr == ""


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish(tmp_path: Path) -> None:
    (tmp_path / "some file.txt").touch()
    for line, offered in CASES:
        script = f"{completion_script('fish', 'tool', commands())}\ncomplete -C {line!r}"
        command = ["fish", "--no-config", "-c", script]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        found = {text.split("\t")[0] for text in done.stdout.splitlines()}
        assert found == offered, line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script() -> None:
    script = completion_script("zsh", "tool", commands())
    subprocess.run(["zsh", "-f", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_command_flag_and_choice(shell: str) -> None:
    script = completion_script(shell, "tool", commands())
    for word in ("serve", "bench", "shell", "mode", "input", "count", "quiet", "fast", "slow", "bash", "zsh"):
        assert word in script
