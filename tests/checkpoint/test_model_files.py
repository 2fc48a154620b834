"""Models of the hub: asked for by revision and with a token, data files alone; what to do where it gives nothing."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from compiled_llm import EngineConfig
from compiled_llm.checkpoint import hub
from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer
from tests.families import checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"hello",
    "consolidated.safetensors": b"a copy",
    "original/params.json": b"another",
    "modeling.py": b"code",
}


class Hub(ThreadingHTTPServer):
    """A hub with one model, ``us/model``, for those who have the token "secret"; it keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers.get("Authorization") != "Bearer secret":
            code = "GatedRepo" if "gated" in self.path else "RepoNotFound"
            self.answer(401, b"", {"X-Error-Code": code})
        elif self.path.startswith("/api/models/us/model/revision/v1"):
            siblings = [{"rfilename": name} for name in FILES]
            content = {"id": "us/model", "_id": "1", "sha": COMMIT, "siblings": siblings}
            self.answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith(f"/api/models/us/model/tree/{COMMIT}"):
            files = [{"type": "file", "path": n, "size": len(c), "oid": f"{len(c)}"} for n, c in FILES.items()]
            self.answer(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
        elif self.path.startswith("/api/models/us/model"):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            content = FILES[self.path.removeprefix(f"/us/model/resolve/{COMMIT}/")]
            self.answer(200, content, {"ETag": f'"{len(content)}"'})

    do_HEAD = do_GET


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


def ask(home: Path, url: str, model: str, revision: str | None, **variables: str) -> str:
    """What ``model_directory`` gives in a process of its own, or the message of its error."""
    program = (
        "import sys; from compiled_llm.checkpoint.model_files import model_directory\n"
        "try: print(model_directory(sys.argv[1], sys.argv[2] or None))\n"
        "except ValueError as error: print(error)"
    )
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": url, **variables}
    command = [sys.executable, "-c", program, model, revision or ""]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_data_files_of_a_revision_come_with_the_token(tmp_path: Path, server: Hub) -> None:
    directory = Path(ask(tmp_path, server.url, "us/model", "v1", HF_TOKEN="secret"))
    wanted = {"config.json", "model.safetensors", "chat_template.jinja"}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {name: FILES[name] for name in wanted}
    assert not [path for path in server.asked if "consolidated" in path or "original" in path or ".py" in path]
    assert ask(tmp_path, server.url, "us/model", "v1", HF_TOKEN="secret", HF_HUB_OFFLINE="1") == str(directory)


def test_what_is_not_given_says_what_to_do(tmp_path: Path, server: Hub) -> None:
    for model, revision, token, words in (
        ("us/model", None, "", "model='us/model' is no directory .*private: check the id, or set HF_TOKEN"),
        ("us/gated", None, "", "accepted their terms: do so on its page, and set HF_TOKEN"),
        ("us/model", "v2", "secret", "revision='v2' .* no such branch, tag or commit"),
    ):
        variables = {"HF_TOKEN": token} if token else {}
        said = ask(tmp_path, server.url, model, revision, **variables)
        assert re.search(words, said), said


def test_without_a_network_it_says_how_to_do_without(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    for variables, why in (({}, f"{nowhere} cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        said = ask(tmp_path, nowhere, "us/model", None, **variables)
        for words in (why, str(tmp_path), "`hf download us/model`", "or give a directory"):
            assert words in said


def test_a_revision_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple] = []
    directory = checkpoint("llama")

    def download(repo_id: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append((repo_id, revision))
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = EngineConfig(model="us/model", revision="v1.1", tokenizer="us/words", tokenizer_revision="abc123")
    assert checkpoint_directory(config) == directory
    with pytest.raises(ValueError, match="tokenizer"):  # there is none in the directory
        load_tokenizer(config, directory)
    assert checkpoint_directory(EngineConfig(model="us/model")) == directory
    assert asked == [("us/model", "v1.1"), ("us/words", "abc123"), ("us/model", None)]


def test_what_the_hub_says_is_told_with_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **options: object) -> str:
        raise OSError("401 Client Error: gated")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=r"tokenizer='us/words', revision='v1' is no directory here, .* 401 .* gated"):
        hub.model_directory("us/words", "v1", "tokenizer")
    with pytest.raises(ValueError, match="model='us/model' is no directory here, nor to be had as a hub id: 401"):
        hub.model_directory("us/model")


def test_a_directory_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"revision must be None for a directory, .* given 'v1'"):
        hub.model_directory(str(tmp_path), "v1")
