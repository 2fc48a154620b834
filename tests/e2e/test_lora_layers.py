"""Adapters of experts, heads, embeddings and latents: the same bits in any company, chunks and kinds of base weights.

``tests/adapters/test_with_peft.py`` compares their numbers with PEFT's.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from compiled_llm import CompiledEngine, LoRARequest
from tests.adapters.made import embeddings_and_stacks, linear_modules, write_adapter
from tests.drawn import marked
from tests.e2e.test_lora import SIZES, Result, alone, results
from tests.families import checkpoint, transformers_model

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "lora_target_modules": ("*",)}
MODELS = ("qwen3-moe", "qwen3", "gpt-oss", "deepseek-v3", "mixtral")


@pytest.fixture(scope="module", params=marked(MODELS, ["qwen3-moe"]))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def adapters(name: str, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Of each prompt: one of all layers, one of embeddings and the head, one of experts or latents; or none."""
    model, directory = transformers_model(name), tmp_path_factory.mktemp("adapters")
    modules, (embeddings, stacks) = linear_modules(model), embeddings_and_stacks(model)
    head = {"lm_head": tuple(model.lm_head.weight.shape)}
    latents = {name: shape for name, shape in modules.items() if name.endswith("kv_b_proj")}
    chosen: list[Any] = [
        ({**modules, **head}, embeddings, stacks),
        (head, embeddings),
        (latents or ({} if stacks else modules), {}, stacks),
    ]
    made = [
        LoRARequest(f"adapter {i}", str(write_adapter(directory / str(i), *own, seed=i, r=rank)))
        for i, (own, rank) in enumerate(zip(chosen, (8, 3, 2), strict=True))
    ]
    return [*made, None, made[2], made[1]]


def serve(name: str, **changes: Any) -> CompiledEngine:
    return CompiledEngine(str(checkpoint(name)), **{"dtype": "bfloat16", **SIZES, **LORA, **changes})


@pytest.fixture(scope="module")
def engine(name: str) -> Iterator[CompiledEngine]:
    with serve(name) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: CompiledEngine, adapters: list[LoRARequest | None]) -> list[Result]:
    return alone(engine, adapters)


def test_company_and_chunks_change_no_bit(
    name: str, engine: CompiledEngine, adapters: list[LoRARequest | None], expected: list[Result]
) -> None:
    engine.reset_prefix_cache()
    assert results(engine, adapters) == expected
    with serve(name, token_bucket_sizes=(16,), max_loras=2) as chunked:
        assert results(chunked, adapters) == expected


def test_without_adapters_it_is_the_engine_without_them(
    name: str, engine: CompiledEngine, expected: list[Result]
) -> None:
    with CompiledEngine(str(checkpoint(name)), dtype="bfloat16", **SIZES) as plain:
        assert results(plain, [None] * 6) == results(engine, [None] * 6)
        without = plain.memory_report()
    assert engine.memory_report().bytes_of("weights") == without.bytes_of("weights")


@pytest.fixture(params=["int8", "int8_w8a8", "int4", "int4_w4a8", "fp8", "mxfp4"])
def quantized(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Engine arguments."""
    return {"quantization": request.param, "quantization_head": "int8", "quantization_embedding": "int8"}


@pytest.mark.battery
def test_quantised_weights(quantized: dict[str, Any], name: str, adapters: list[LoRARequest | None]) -> None:
    with serve(name, **quantized) as engine:
        separate = alone(engine, adapters)
        engine.reset_prefix_cache()
        assert results(engine, adapters) == separate
        with CompiledEngine(str(checkpoint(name)), dtype="bfloat16", **SIZES, **quantized) as plain:
            assert results(plain, [None] * 6) == results(engine, [None] * 6)


@pytest.mark.battery
def test_compiled_steps_of_quantised_weights(
    quantized: dict[str, Any], name: str, adapters: list[LoRARequest | None]
) -> None:
    with serve(name, **quantized) as engine, serve(name, **quantized, enforce_eager=False) as compiled:
        assert results(compiled, adapters) == results(engine, adapters)


@pytest.mark.battery
def test_compiled_steps_have_the_same_bits(
    name: str, adapters: list[LoRARequest | None], expected: list[Result]
) -> None:
    with serve(name, enforce_eager=False) as engine:
        assert results(engine, adapters) == expected
