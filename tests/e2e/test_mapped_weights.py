"""Engines whose weights lie in a file give the same answers, also where memory has no room for them."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.config import EngineConfig
from compiled_llm.engine.preflight import look_at
from compiled_llm.models.linears.dense import Dense
from compiled_llm.worker import started_model
from compiled_llm.worker.mapped_weights import keeping
from compiled_llm.worker.memory import StartMemory
from compiled_llm.worker.read_ahead import ReadAhead
from tests.checkpoint.gguf.writing import MODELS, metadata_of, tensors_of, write
from tests.e2e.test_gguf import kind_of
from tests.families import checkpoint

SIZES: dict[str, Any] = {"bucket_sizes": (4,), "token_bucket_sizes": (32,), "num_kv_blocks": 32, "max_model_len": 64}
PROMPTS = [{"prompt_token_ids": [5 * n + i for i in range(n)]} for n in (1, 3, 17)]
ASKED = [
    SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
]


def outputs(engine: CompiledEngine) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs)
        for output in engine.generate(PROMPTS, ASKED, use_tqdm=False)
    ]


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a third of the weights, and blocks so small that those of small models pass."""
    share = StartMemory.share_with_mapped
    monkeypatch.setattr(StartMemory, "share_with_mapped", lambda self, size: share(self, size) // 3)
    monkeypatch.setattr(started_model, "ReadAhead", functools.partial(ReadAhead, block=8192))


def checked(tmp_path: Path, **arguments: Any) -> CompiledEngine:
    """An engine that found its weights in a file, once its answers were those of one that has them in memory."""
    arguments = {"enforce_eager": True, "progress": "off", **SIZES, **arguments}
    with CompiledEngine(**arguments) as plain:
        expected = outputs(plain)
    with CompiledEngine(**arguments, weights_path=str(tmp_path / "kept")) as first:
        assert outputs(first) == expected
    engine = CompiledEngine(**arguments, weights_path=str(tmp_path / "kept"))
    assert outputs(engine) == outputs(engine) == expected
    return engine


def test_the_same_answers_and_a_ledger_that_adds_up(tmp_path: Path) -> None:
    with checked(tmp_path) as engine:
        ledger = engine.memory_report()
        mapped = ledger.bytes_of("mapped weights")
        assert mapped == engine.runner.read_ahead.weights.nbytes
        assert ledger.bytes_of("weights") < mapped / 10
        assert all(row.where == "host" for row in ledger.rows)
        assert engine.stats().disk_bytes == 0
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "arguments",
    [{"quantization": "int8"}, {"quantization": "int4_w4a8", "enable_lora": True}, {"model": "qwen3-moe"}],
    ids=["int8", "int4 and adapters", "experts"],
)
def test_the_same_answers_where_memory_is_short(arguments: dict[str, Any], tmp_path: Path) -> None:
    if "model" in arguments:
        arguments = {"model": str(checkpoint(arguments["model"])), "dtype": "bfloat16"}
    with checked(tmp_path, **arguments) as engine:
        plan = engine.runner.read_ahead.plan
        assert plan.bytes_of(passes=True) > 0
        rows = [(row.name, row.where) for row in engine.memory_report().rows]
        assert ("mapped weights", "host") in rows


@pytest.mark.usefixtures("little_memory")
def test_a_gguf_file(tmp_path: Path) -> None:
    name = "llama in blocks"
    path = write(tmp_path / "m.gguf", MODELS[name][0], metadata_of(name), tensors_of(name), kind_of)
    checked(tmp_path, model=str(path), dtype="bfloat16").close()


@pytest.mark.battery
@pytest.mark.usefixtures("little_memory")
def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    checked(tmp_path, model_process=True).close()


def test_check_reads_what_is_kept(tmp_path: Path) -> None:
    config = EngineConfig(**SIZES, weights_path=str(tmp_path))
    rows = dict(look_at(config))
    assert "the next start packs and keeps them" in rows["kept weights"]
    assert "room" in rows
    with CompiledEngine(**SIZES, weights_path=str(tmp_path), enforce_eager=True, progress="off"):
        pass
    assert "all of it as it was written" in dict(look_at(config))["kept weights"]
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.write(bytes(range(1, 200)))
    with pytest.raises(ValueError, match="is not what was written"):
        dict(look_at(config))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights_path": ""}, "weights_path must be a directory as a non-empty str, given ''"),
        ({"weights_path": "w", "load_format": "dummy"}, "weights_path must be None with load_format='dummy'"),
        ({"weights_bytes": 5}, "weights_bytes must be None without weights_path, given 5"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**arguments)


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="weights_path must be None on cuda"):
        keeping(EngineConfig(weights_path="w"), torch.device("cuda"), Dense)


def test_a_directory_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights_path: the packed weights take [\d,]+ bytes, and .* may have 1,000"):
        CompiledEngine(enforce_eager=True, weights_path=str(tmp_path / "kept"), weights_bytes=1000, **SIZES)
