"""What docs/serving.md tells a newcomer to type works with a server: commands, libraries, and files of docs/deploy."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.__main__ import main
from compiled_llm.server.settings import ServerSettings
from tests.docs.markdown import ROOT, blocks, statements
from tests.server.conftest import Running

PAGE = ROOT / "docs" / "serving.md"
DEPLOY = ROOT / "docs" / "deploy"
URL = f"http://127.0.0.1:{ServerSettings.port}"
PARTS_OF_A_HISTOGRAM = ("_bucket", "_sum", "_count")


def commands(start: str) -> list[str]:
    return [each for block in blocks(PAGE, "bash") for each in statements(block) if each.startswith(start)]


def snippet(package: str) -> str:
    (found,) = [block.text for block in blocks(PAGE, "python") if block.text.startswith(f"from {package} import")]
    return found


def check_twice(printed: str) -> None:
    """An answer as a whole, with a line's end, and then the same in pieces."""
    half = len(printed) // 2
    assert printed[:half] + "\n" + printed[:half] == printed


def test_the_commands_of_curl(running: Running) -> None:
    chat, stream = (
        subprocess.run(
            shlex.split(command.replace(URL, running.url)), capture_output=True, check=True, text=True
        ).stdout
        for command in commands("curl ")
    )
    assert json.loads(chat)["usage"]["completion_tokens"] == 24
    assert stream.endswith("data: [DONE]\n\n")


def test_openais_library_prints_one_answer_twice(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    text = snippet("openai").replace(URL, running.url).replace("max_tokens=24", "max_tokens=24, temperature=0")
    exec(compile(text, str(PAGE), "exec"), {})
    check_twice(capsys.readouterr().out)


def test_anthropics_library(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("anthropic")
    if "/v1/messages" not in running.http.get("/openapi.json").json()["paths"]:
        pytest.skip("this server has no /v1/messages yet")
    exec(compile(snippet("anthropic").replace(URL, running.url), str(PAGE), "exec"), {})
    assert len(capsys.readouterr().out) > 10


def test_the_chat(running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = commands("printf ")
    text, _, chat = command.partition(" | ")
    monkeypatch.setattr("sys.stdin", io.StringIO(shlex.split(text)[1].encode().decode("unicode_escape")))
    assert main(shlex.split(chat.replace(URL, running.url))[1:]) == 0
    out, err = capsys.readouterr()
    assert "last answer   24 tokens in " in out
    assert "(cut at max_tokens=24: " in err


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
    check_twice(done.stdout)


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


def test_every_flag_of_the_server_that_the_page_names_is_there() -> None:
    from compiled_llm.bench.serve import parser as load
    from compiled_llm.commands.chat import parser as chat
    from compiled_llm.commands.serve import parser

    flags = set().union(*(each("it")._option_string_actions for each in (parser, load, chat)))
    named = {word.strip("`.,;:()") for word in PAGE.read_text().split() if word.strip("`(").startswith("--")}
    assert {flag.partition("`")[0] for flag in named} <= flags


def metrics(running: Running) -> set[str]:
    """The names of all samples, once a request was served."""
    assert running.http.post("/v1/completions", json={"prompt": "import", "max_tokens": 2}).status_code == 200
    lines = running.http.get("/metrics").text.splitlines()
    return {re.split("[{ ]", line)[0] for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yml"])
def test_dashboard_and_alerts_ask_for_metrics_that_there_are(running: Running, name: str) -> None:
    text = (DEPLOY / name).read_text()
    asked = set(re.findall(r"\b(?:vllm|compiled_llm):\w+", text))
    assert len(asked) > 4
    assert asked <= metrics(running)


def test_the_dashboard_is_one() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({str(panel["gridPos"]) for panel in panels}) == len(panels)
    assert all(target["expr"].count("(") == target["expr"].count(")") for each in panels for target in each["targets"])
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance"}


def test_the_unit_and_the_image_call_programs_that_there_are() -> None:
    unit, image = (DEPLOY / "compiled-llm.service").read_text(), (DEPLOY / "Containerfile").read_text()
    from compiled_llm.commands.serve import parser

    (start,) = re.findall(r"^ExecStart=\S+/compiled-llm serve (.*)$", unit, re.MULTILINE)
    parser("serve").parse_args(start.split())
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)
    assert json.loads(entry)[:2] == ["compiled-llm", "serve"]
    assert parser("serve").parse_args(json.loads(entry)[2:]).host == "0.0.0.0"
    for line in re.findall(r"^COPY (.*) \S+$", image, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line


@pytest.mark.battery
def test_promtool_takes_metrics_rules_and_configuration(running: Running) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    for kind, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run([promtool, "check", kind, DEPLOY / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    metrics(running)
    text = running.http.get("/metrics").text
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if not line.endswith("should not contain ':'")]
    assert (done.returncode in (0, 3), told) == (True, []), "vLLM's names have colons; nothing else is wrong"
