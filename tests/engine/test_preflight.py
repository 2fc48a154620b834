"""What is said of a model before it starts is what its engine finds."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.engine.preflight import look_at
from tests.families import checkpoint

SIZES = {"bucket_sizes": (1, 2), "token_bucket_sizes": (64,), "max_model_len": 128}


@pytest.mark.parametrize("family", ["lfm2", "gemma3"])
def test_bytes_are_those_of_the_engine(family: str) -> None:
    directory = checkpoint(family)
    config = EngineConfig(model=str(directory), enforce_eager=True, progress="off", num_kv_blocks=40, **SIZES)
    rows = dict(look_at(config))
    with CompiledEngine.from_config(config) as engine:
        runner = engine.runner
        assert rows["weights"].endswith(f": {runner.weight_bytes / 2**20:,.1f} MiB in memory")
        assert ("bytes of state a request" in rows["KV cache"]) == bool(runner.pool_sizes.slot_bytes)
        assert rows["exact bits"] == runner.exact
        assert rows["family"].startswith(engine.model_config.architecture)
    assert f"{40 * 16 // 128} requests of 128 tokens at once" in rows["room"]


def test_the_longest_request_is_what_the_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def room(free: int, max_model_len: int = 128) -> str:
        monkeypatch.setattr("compiled_llm.worker.memory.free_memory", lambda: free)
        return dict(look_at(EngineConfig(bucket_sizes=(1,), max_model_len=max_model_len)))["room"]

    assert room(2**30).startswith("max_model_len may be up to 1,024; room for")
    with pytest.raises(ValueError, match=r"the weights need \d+ MiB in bfloat16.* and 1 are free on cpu"):
        room(2**20)
    with pytest.raises(ValueError, match="are free for the KV pool, and a request of max_model_len=128"):
        room(8_800_000)
    free = 15_200_000
    longest = int(room(free).split("up to ")[1].split(",")[0])
    assert 0 < longest < 1024
    room(free, longest)


def test_flags_of_the_engine_change_the_rows() -> None:
    rows = dict(look_at(EngineConfig(quantization="int8", kv_cache_dtype="int8")))
    assert rows["weights"].startswith("bfloat16, rounded to int8: ")
    assert rows["KV cache"].startswith("int8, 1088 bytes a token")


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    generation = {"eos_token_id": 0, "temperature": 0.6, "no_repeat_ngram_size": 3}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    rows = list(look_at(EngineConfig(model=str(directory))))
    assert ("sampling", "generation_config.json suggests temperature=0.6") in rows
    (note,) = (text for name, text in rows if name == "note")
    assert "no_repeat_ngram_size=3" in note


def test_ranks_have_their_parts() -> None:
    def looked_at(**arguments: Any) -> dict[str, str]:
        return dict(look_at(EngineConfig(model=str(checkpoint("mixtral")), **arguments)))

    one, two = looked_at(), looked_at(tensor_parallel_size=2)
    sizes = [float(rows["weights"].split(": ")[1].split(" MiB")[0]) for rows in (one, two)]
    assert sizes[0] / 2 <= sizes[1] < 0.6 * sizes[0]
    assert "of each of 2 ranks" in two["weights"]
    sizes = [float(re.findall(r"([\d,]+) bytes", rows["KV cache"])[0].replace(",", "")) for rows in (one, two)]
    assert sizes[0] == 2 * sizes[1], one["KV cache"]
    with pytest.raises(ValueError, match="tensor_parallel_size must divide num_attention_heads=4, given 3"):
        looked_at(tensor_parallel_size=3)


def test_headers_are_checked_and_values_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, directory)
    monkeypatch.setattr("compiled_llm.checkpoint.reader.CheckpointReader.__init__", None)
    assert "names and shapes" in dict(look_at(EngineConfig(model=str(directory))))["files"]
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    with pytest.raises(ValueError, match=r"the checkpoint does not match its config\.json; mismatched: "):
        list(look_at(EngineConfig(model=str(directory))))
    (directory / "tokenizer.json").unlink()
    rows = look_at(EngineConfig(model=str(directory), load_format="dummy"))
    assert ("tokenizer", "none: it serves prompt_token_ids only") in list(rows)


def test_a_model_of_the_hub_is_looked_at_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "snapshot"
    shutil.copytree(DEMO_MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    asked = []

    def download(model: str, allow_patterns: list[str], **options: object) -> str:
        asked.append(allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    rows = dict(look_at(EngineConfig(model="us/model")))
    assert rows["files"] == "the weights were not downloaded from the hub, and their headers not read"
    assert "room" in rows
    assert asked == [["*.json", "*.jinja"]]
