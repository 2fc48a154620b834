"""Adapters over HTTP: served under their names, loaded and unloaded while others are answered."""

import asyncio
import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.adapters import host_adapters
from compiled_llm.api.config import EngineConfig
from compiled_llm.server.adapters import check_lora_settings
from compiled_llm.server.replicas import Replicas
from compiled_llm.server.run import Server
from compiled_llm.server.settings import DEMO_NAME, ServerSettings
from tests.adapters.made import write_adapter
from tests.server.conftest import SIZES, Running, ThreadClient, running_with

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(
        enforce_eager=True, progress="off", enable_lora=True, max_loras=1, max_cpu_loras=3, max_lora_rank=4, **SIZES
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def paths(engine: CompiledEngine, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of the first layer's queries."""
    config, directory = engine.model_config, tmp_path_factory.mktemp("adapters")
    modules = {"model.layers.0.self_attn.q_proj": (config.num_heads * config.head_dim, config.hidden_size)}
    return [write_adapter(directory / str(i), modules, seed=i, lora_alpha=32) for i in range(3)]


@pytest.fixture(scope="module")
def expected(engine: CompiledEngine, paths: list[Path]) -> dict[str, str]:
    """What the model and each adapter answer to ``PROMPT``, by their names on the server."""
    requests = [None, *(LoRARequest(f"reference {path}", str(path)) for path in paths)]
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = engine.generate([PROMPT] * 4, params, lora_request=requests, use_tqdm=False)
    texts = dict(zip((DEMO_NAME, "one", "two", "three"), (output.outputs[0].text for output in outputs), strict=True))
    assert len(set(texts.values())) == 4
    return texts


@pytest.fixture(scope="module")
def server(engine: CompiledEngine, paths: list[Path], expected: dict[str, str]) -> Iterator[Running]:
    modules = f"one={paths[0]}", json.dumps({"name": "two", "path": str(paths[1]), "base_model_name": DEMO_NAME})
    with running_with(engine, lora_modules=modules, allow_lora_updates=True) as server:
        yield server


def text_of(server: Running, model: str, **more: Any) -> str:
    answer = server.openai.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=12, **more)
    if more.get("stream"):
        return "".join(chunk.choices[0].text for chunk in answer)  # type: ignore[union-attr]
    assert answer.model == model
    return answer.choices[0].text


def names_of(server: Running) -> list[str]:
    return [model.id for model in server.openai.models.list()]


def load(server: Running, name: str, path: Path, **more: Any) -> str:
    """The text of the answer; its error where it is one."""
    answer = server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})
    return answer.text if answer.status_code == 200 else f"{answer.status_code} {answer.json()['error']['message']}"


def unload(server: Running, name: str) -> int:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": None}).status_code


def test_clients_choose_an_adapter_by_the_models_name(server: Running, expected: dict[str, str]) -> None:
    for name in ("one", DEMO_NAME, "two"):
        assert text_of(server, name) == text_of(server, name, stream=True) == expected[name]
    with pytest.raises(openai.NotFoundError, match=f"model three is not served here: {DEMO_NAME} and 2 adapters"):
        text_of(server, "three")


def test_every_dialect_takes_the_name(server: Running) -> None:
    message = [{"role": "user", "content": "hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": message, "max_tokens": 8},
        "/v1/responses": {"input": "hello", "max_output_tokens": 8},
        "/v1/messages": {"messages": message, "max_tokens": 8},
        "/v1/score": {"prompt": PROMPT, "continuations": ["\n", " x"]},
    }
    for path, body in bodies.items():
        answers = [server.http.post(path, json={"model": model, **body}).json() for model in (DEMO_NAME, "one")]
        assert [answer["model"] for answer in answers] == [DEMO_NAME, "one"]
        for answer in answers:
            for name in ("id", "created", "created_at", "completed_at", "model"):
                answer.pop(name, None)
        assert str(answers[0]) != str(answers[1]), path
    assert server.http.post("/tokenize", json={"model": "one", "prompt": PROMPT}).json()["count"] > 0
    assert server.http.post("/tokenize", json={"model": "three", "prompt": PROMPT}).status_code == 404


def test_models_lists_adapters(server: Running, paths: list[Path]) -> None:
    base, one, two = server.http.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == (DEMO_NAME, None)
    assert (one["id"], one["root"], one["parent"]) == ("one", str(paths[0]), DEMO_NAME)
    assert server.http.get("/v1/models/two").json() == two
    names = server.http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]["model"]
    assert {"enum": [DEMO_NAME, "one", "two"]} in names["anyOf"]


def test_adapters_come_and_go(server: Running, paths: list[Path], expected: dict[str, str]) -> None:
    assert load(server, "three", paths[2]) == "Success: LoRA adapter 'three' added successfully."
    assert text_of(server, "three") == expected["three"]
    assert "400 lora_name must be a new one, and adapter 'three' has already been loaded" in load(
        server, "three", paths[0]
    )
    load(server, "three", paths[0], load_inplace=True)
    assert text_of(server, "three") == expected["one"]
    assert unload(server, "three") == 200
    assert unload(server, "three") == 404
    with pytest.raises(openai.NotFoundError):
        text_of(server, "three")
    assert text_of(server, "one") == expected["one"]  # whose files they are too


def test_what_cannot_be_loaded(server: Running, paths: list[Path], tmp_path: Path, expected: dict[str, str]) -> None:
    (tmp_path / "bad").mkdir()
    bad = shutil.copytree(paths[0], tmp_path / "large rank")
    (bad / "adapter_config.json").write_text((bad / "adapter_config.json").read_text().replace('"r": 4', '"r": 8'))
    assert load(server, "new", tmp_path / "none").startswith("404 ")
    assert "400 lora_name must not be a name of the model" in load(server, DEMO_NAME, paths[0])
    assert "by the base model and the rank 8" in load(server, "new", bad)
    assert load(server, "new", paths[0], base_model_name="other").startswith("400 base_model_name must be one of")
    for body in ({}, {"lora_name": "new"}, {"lora_name": 1, "lora_path": "x"}, {"name": "x"}):
        assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 400, body
    assert names_of(server) == [DEMO_NAME, "one", "two"]
    assert text_of(server, "two") == expected["two"]


def test_an_adapter_that_is_gone_fails_its_own_requests(
    server: Running, paths: list[Path], tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_adapters, "_FRESH_SECONDS", 0.0)
    path = Path(shutil.copytree(paths[2], tmp_path / "three"))
    load(server, "gone", path)
    stream = server.openai.completions.create(
        model="gone", prompt=PROMPT, temperature=0, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
    )
    text = next(stream).choices[0].text
    shutil.rmtree(path)
    with pytest.raises(openai.BadRequestError, match="must be a directory with"):
        text_of(server, "gone")
    assert text_of(server, "one") == expected["one"]
    assert unload(server, "gone") == 200
    text += "".join(chunk.choices[0].text for chunk in stream)  # it has its adapter until its end
    assert text.startswith(expected["three"])


def test_nobody_waits_for_the_reading_of_anothers(
    server: Running, paths: list[Path], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, num_reads = threading.Event(), 0
    read_adapter = host_adapters.read_adapter

    def reading(name: str, path: Path, *arguments: Any) -> Any:
        nonlocal num_reads
        if name == "slow":
            num_reads += 1
            assert may_read.wait(30)
        return read_adapter(name, path, *arguments)

    load(server, "slow", paths[2])
    server.client.clients[0]._engine._admission.host_adapters._recent.clear()  # type: ignore[attr-defined]
    monkeypatch.setattr(host_adapters, "read_adapter", reading)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(text_of(server, "slow"))) for _ in range(40)]
    with contextlib.ExitStack() as stack:
        stack.callback(may_read.set)
        for thread in threads:
            thread.start()
        assert text_of(server, "one") == expected["one"]  # which is to be read too
        assert text_of(server, DEMO_NAME) == expected[DEMO_NAME]
        assert not answers
    for thread in threads:
        thread.join()
    assert set(answers) == {expected["three"]}
    assert num_reads == 1
    unload(server, "slow")


def test_the_metric_names_who_runs_and_who_waits(server: Running) -> None:
    def run(model: str) -> None:
        list(text_of(server, model, stream=True, extra_body={"ignore_eos": True, "max_tokens": 60}))

    threads = [threading.Thread(target=run, args=(model,)) for model in ("one", "two")]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        families = text_string_to_metric_families(server.http.get("/metrics").text)
        (sample,) = next(family for family in families if family.name == "vllm:lora_requests_info").samples
        labels = sample.labels
        seen.add((labels["max_lora"], labels["running_lora_adapters"], labels["waiting_lora_adapters"]))
    assert seen & {("1", "one", "two"), ("1", "two", "one")}, seen


def test_settings_that_the_engine_does_not_allow() -> None:
    for settings in (ServerSettings(lora_modules=("a=b",)), ServerSettings(allow_lora_updates=True)):
        with pytest.raises(ValueError, match=r"needs enable_lora, given .* without it"):
            check_lora_settings(settings, EngineConfig())
    for given in (("a",), ('{"name": "a"}',), ("{",), ('{"name": "a", "path": "b", "x": 1}',), ("a=b", "a=c")):
        with pytest.raises(ValueError, match=r"lora_modules must (be NAME=PATH|have each name once)"):
            ServerSettings(lora_modules=given)


def test_a_start_with_a_bad_adapter_fails(engine: CompiledEngine, tmp_path: Path) -> None:
    settings = ServerSettings(lora_modules=(f"a={tmp_path / 'none'}",))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Replicas([ThreadClient(engine)], settings)
        server = Server("test", client, settings, listener, DEMO_NAME)
        with pytest.raises(ValueError, match="must be a directory with"):
            asyncio.run(server.run())


def test_nothing_is_loaded_without_the_flag(engine: CompiledEngine, paths: list[Path]) -> None:
    with running_with(engine, lora_modules=(f"one={paths[0]}",)) as server:
        assert load(server, "two", paths[1]).startswith("404 ")
        assert unload(server, "one") == 404
        assert names_of(server) == [DEMO_NAME, "one"]
