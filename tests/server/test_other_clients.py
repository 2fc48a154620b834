"""What docs/serving.md shows besides curl and OpenAI's library: this project's own clients, LangChain and llm."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.__main__ import main
from tests.docs.markdown import blocks, statements
from tests.server.conftest import Running
from tests.server.test_documents import PAGE, URL, snippet


def commands(start: str) -> list[str]:
    return [each for block in blocks(PAGE, "bash") for each in statements(block) if each.startswith(start)]


def test_the_chat(running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = commands("printf ")
    text, _, chat = command.partition(" | ")
    monkeypatch.setattr("sys.stdin", io.StringIO(shlex.split(text)[1].encode().decode("unicode_escape")))
    assert main(shlex.split(chat.replace(URL, running.url))[1:]) == 0
    out, err = capsys.readouterr()
    assert "last answer   24 tokens in " in out
    assert "(cut at max_tokens=24: " in err


@pytest.mark.battery  # the ordinary run has the client of loads in tests/bench/test_serve.py
def test_the_load(
    running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (command,) = commands("compiled-llm bench serve")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("--num-prompts 200 --request-rate 10", "--num-prompts 5"))[1:]
    assert main([*words, "--base-url", running.url]) == 0
    out = capsys.readouterr().out
    rows = [
        line[:29].strip()
        for block in blocks(PAGE, "text")
        for line in block.text.splitlines()
        if "  TPOT " in block.text
    ]
    assert [line[:29].strip() for line in out.splitlines()[2:-1]] == rows[1:], "the rows that the page shows"
    result = json.loads(out.splitlines()[-1])
    assert (result["completed"], result["total_output_tokens"]) == (5, 5 * 32)
    assert (tmp_path / "load.svg").is_file()


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has LangChain and llm."""
    directory = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    packages = [name for name in ("langchain-openai", "llm") if f"`pip install {name}`" in PAGE.read_text()]
    done = subprocess.run([directory / "bin" / "pip", "install", "-q", *packages], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {' and '.join(packages)} here")
    return directory / "bin"


@pytest.mark.battery
def test_langchain_prints_one_answer_twice(running: Running, clients: Path) -> None:
    text = (
        snippet("langchain_openai").replace(URL, running.url).replace("max_tokens=24", "max_tokens=24, temperature=0")
    )
    done = subprocess.run([clients / "python", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    half = len(done.stdout) // 2
    assert done.stdout[:half] + "\n" + done.stdout[:half] == done.stdout


@pytest.mark.battery
def test_llm(running: Running, clients: Path, tmp_path: Path) -> None:
    (block,) = blocks(PAGE, "yaml")
    (tmp_path / "extra-openai-models.yaml").write_text(block.text.replace(URL, running.url))
    (command,) = commands("llm ")
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    words = [clients / "llm", *shlex.split(command)[1:]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stdout) > 10) == (0, True), done.stderr
    found = subprocess.run(
        [clients / "llm", "logs", "path"], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).parent == tmp_path, "where the page says that the file is"
