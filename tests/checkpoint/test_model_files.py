"""Models of the hub: asked for by revision and with a token, data files alone; what to do where it gives nothing."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from compiled_llm import EngineConfig
from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer, model_directory
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
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """This process may ask a hub, has no token and an empty cache."""
    for name in list(os.environ):
        if name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()  # one that other tests left may know a proxy
    yield monkeypatch
    huggingface_hub.close_session()


def set_hub(url: str, online: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does at the start of a process."""
    online.setattr(constants, "ENDPOINT", url)
    online.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def server(online: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
        set_hub(hub.url, online)
        yield hub
        hub.shutdown()


def test_data_files_of_a_revision_come_with_the_token(online: pytest.MonkeyPatch, server: Hub) -> None:
    online.setenv("HF_TOKEN", "secret")
    directory = model_directory("us/model", "v1")
    wanted = {"config.json", "model.safetensors", "chat_template.jinja"}
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {name: FILES[name] for name in wanted}
    assert not [path for path in server.asked if "consolidated" in path or "original" in path or ".py" in path]
    online.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_directory("us/model", "v1") == directory


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("model", "revision", "token", "words"),
    [
        ("us/model", None, "", "model='us/model' is no directory .*private: check the id, or set HF_TOKEN"),
        ("us/gated", None, "", "accepted their terms: do so on its page, and set HF_TOKEN"),
        ("us/model", "v2", "secret", "revision='v2' .* no such branch, tag or commit"),
    ],
)
def test_what_is_not_given_says_what_to_do(
    model: str, revision: str | None, token: str, words: str, online: pytest.MonkeyPatch
) -> None:
    online.setenv("HF_TOKEN", token)
    with pytest.raises(ValueError, match=words):
        model_directory(model, revision)


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_it_says_how_to_do_without(offline: bool, online: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    set_hub(nowhere, online)
    online.setattr(constants, "HF_HUB_OFFLINE", offline)
    why = "HF_HUB_OFFLINE is set" if offline else f"{nowhere} cannot be reached"
    with pytest.raises(ValueError, match=why) as error:
        model_directory("us/model")
    for words in (str(tmp_path), "`hf download us/model`", "or give a directory"):
        assert words in str(error.value)


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
        model_directory("us/words", "v1", "tokenizer")
    with pytest.raises(ValueError, match="model='us/model' is no directory here, nor to be had as a hub id: 401"):
        model_directory("us/model")


def test_a_directory_has_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"revision must be None for a directory, .* given 'v1'"):
        model_directory(str(tmp_path), "v1")
