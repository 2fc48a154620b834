"""Adapters in a whole engine: PEFT's numbers, and the same bits in any company, chunks and order."""

import asyncio
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import AsyncCompiledEngine, CompiledEngine, LoRARequest, RequestOutput, SamplingParams
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.adapters.made import linear_modules, merged, write_adapter
from tests.compiling.test_function import check_one_graph
from tests.draft_heads import write_eagle3
from tests.drawn import marked
from tests.families import EVERY_CONFIG, checkpoint, logits_of, transformers_model

MODEL = "qwen3"
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, *range(20 + 3 * i, 60 + 3 * i)] for i in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=1, prompt_logprobs=0, ignore_eos=True)
SIZES: dict[str, Any] = {
    "bucket_sizes": (4,), "token_bucket_sizes": (64,), "max_model_len": 96, "num_kv_blocks": 64, "progress": "off",
    "enforce_eager": True, "check_invariants": True,
}  # fmt: skip
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
Result = tuple[list[int], list[float]]


def logprobs_of(output: RequestOutput) -> list[float]:
    """Of all tokens but the first."""
    assert output.outputs[0].finish_reason != "error", output.outputs[0].stop_reason
    prompt, rows = output.prompt_logprobs, output.outputs[0].logprobs
    assert prompt is not None
    assert rows is not None
    values = [row[token].logprob for row, token in zip(prompt[1:], output.prompt_token_ids[1:], strict=True) if row]
    return values + [row[token].logprob for row, token in zip(rows, output.outputs[0].token_ids, strict=True)]


def results(
    engine: CompiledEngine, requests: list[LoRARequest | None], which: range = range(len(PROMPTS))
) -> list[Result]:
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in which]
    chosen = [requests[i] for i in which]
    outputs = engine.generate(prompts, PARAMS, lora_request=chosen, use_tqdm=False, raise_on_error=True)
    return [(output.outputs[0].token_ids, logprobs_of(output)) for output in outputs]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Of each of ``PROMPTS``: three adapters of different layers and ranks, and the model as it is."""
    directory = tmp_path_factory.mktemp("adapters")
    modules = linear_modules(transformers_model(MODEL))
    chosen = [
        modules,
        {name: shape for name, shape in modules.items() if name.endswith(("q_proj", "v_proj"))},
        {name: shape for name, shape in modules.items() if name.endswith(("down_proj", "up_proj", "k_proj"))},
    ]
    made = [
        LoRARequest(f"adapter {i}", str(write_adapter(directory / str(i), own, seed=i, r=rank)))
        for i, (own, rank) in enumerate(zip(chosen, (8, 3, 1), strict=True))
    ]
    return [made[0], made[1], made[2], None, made[1], made[0]]


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(str(checkpoint(MODEL)), dtype="bfloat16", **SIZES, **LORA) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: CompiledEngine, adapters: list[LoRARequest | None]) -> list[Result]:
    return alone(engine, adapters)


def alone(engine: CompiledEngine, adapters: list[LoRARequest | None]) -> list[Result]:
    """Each request by itself."""
    found = []
    for i in range(len(PROMPTS)):
        engine.reset_prefix_cache()
        found += results(engine, adapters, range(i, i + 1))
    assert len({str(tokens) for tokens, _ in found}) == len(found)
    return found


@pytest.mark.parametrize("name", marked(EVERY_CONFIG, ["gpt2", "gpt-neox-in-turn"]))
def test_log_probabilities_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    """All layers that adapters may change, ranks and alphas by pattern, and the root of the rank."""
    model = transformers_model(name)
    with CompiledEngine(str(checkpoint(name)), dtype="float32", **SIZES, **LORA) as engine:
        adapters = engine.runner.adapters
        assert adapters is not None
        served = [module.split(".")[-1] for module in adapters.layers]
        modules = {name: size for name, size in linear_modules(model).items() if name.split(".")[-1] in served}
        first, *others = modules
        path = write_adapter(
            tmp_path / "adapter", modules, ranks=[3, *[5] * len(others)], r=5, lora_alpha=7, use_rslora=True,
            rank_pattern={first: 3}, alpha_pattern={others[0]: 2},
        )  # fmt: skip
        request = LoRARequest("x", str(path))
        (output,) = engine.generate([PROMPTS[0]], PARAMS, lora_request=request, use_tqdm=False, raise_on_error=True)
    scales = dict.fromkeys(modules, 7 / math.sqrt(5)) | {first: 7 / math.sqrt(3), others[0]: 2 / math.sqrt(5)}
    tokens = torch.tensor([PROMPTS[0] + output.outputs[0].token_ids])
    of_model = torch.log_softmax(logits_of(merged(model, scales, path), tokens)[0], -1)
    reference = of_model[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs_of(output)), reference, atol=1e-4, rtol=0)
    plain = torch.log_softmax(logits_of(model, tokens)[0], -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert (plain - reference).abs().max() > 0.3, "the adapter changes too little to be seen"


def test_company_changes_no_bit(
    engine: CompiledEngine, adapters: list[LoRARequest | None], expected: list[Result]
) -> None:
    """Three adapters and none at once, of which two have slots: also after eviction, and on a warm prefix cache."""
    engine.reset_prefix_cache()
    assert results(engine, adapters) == expected
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    assert all(output.num_cached_tokens == 32 for output in outputs)
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == tokens
        rows = output.outputs[0].logprobs or []
        assert [row[token].logprob for row, token in zip(rows, tokens, strict=True)] == logprobs[-len(tokens) :]


@pytest.mark.parametrize(
    ("changes", "preempts"),
    [
        ({"token_bucket_sizes": (16,), "max_loras": 3}, False),
        ({"num_kv_blocks": 12, "preemption_mode": "recompute"}, True),
        *(
            pytest.param(*case, marks=pytest.mark.battery)
            for case in (
                ({"num_kv_blocks": 12, "preemption_mode": "swap", "swap_space_bytes": 2**20, "max_loras": 3}, True),
                ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
                ({"max_loras": 1, "enable_prefix_caching": False}, False),
            )
        ),
    ],
    ids=["chunks", "preempted", "swapped", "drafts", "one slot"],
)
def test_chunks_preemptions_and_drafts_change_no_bit(
    changes: dict[str, Any], preempts: bool, adapters: list[LoRARequest | None], expected: list[Result]
) -> None:
    with CompiledEngine(str(checkpoint(MODEL)), **{"dtype": "bfloat16", **SIZES, **LORA, **changes}) as engine:
        assert results(engine, adapters) == expected
        assert (engine.stats().num_preemptions > 0) == preempts


def test_a_head_that_drafts_changes_no_bit(
    adapters: list[LoRARequest | None], expected: list[Result], tmp_path: Path
) -> None:
    """It reads the hidden states of each request's own adapter, and shares weights with the model without one."""
    config = {
        "method": "eagle3", "model": write_eagle3(tmp_path / "head", checkpoint(MODEL)),
        "num_speculative_tokens": 3, "adaptive": False,
    }  # fmt: skip
    with CompiledEngine(str(checkpoint(MODEL)), dtype="bfloat16", **SIZES, **LORA, speculative_config=config) as engine:
        assert results(engine, adapters) == expected
        assert engine.stats().num_draft_tokens > 100


@pytest.mark.battery
@pytest.mark.parametrize("quantization", ["int8", "int4_w4a8"])
def test_quantised_weights_and_cache(quantization: str, adapters: list[LoRARequest | None]) -> None:
    arguments = {**SIZES, **LORA, "quantization": quantization, "kv_cache_dtype": "int8"}
    with CompiledEngine(str(checkpoint(MODEL)), dtype="bfloat16", **arguments) as engine:
        together = results(engine, adapters)
        for i in range(len(PROMPTS)):
            engine.reset_prefix_cache()
            assert results(engine, adapters, range(i, i + 1)) == together[i : i + 1]


def test_without_adapters_it_is_the_engine_without_them(engine: CompiledEngine) -> None:
    with CompiledEngine(str(checkpoint(MODEL)), dtype="bfloat16", **SIZES) as plain:
        assert results(plain, [None] * 6) == results(engine, [None] * 6)
        reports = engine.memory_report(), plain.memory_report()
    assert reports[0].bytes_of("weights") == reports[1].bytes_of("weights")
    assert reports[0].bytes_of("adapters' slots") > 0


def test_continuations_beams_streams_and_scores(engine: CompiledEngine, adapters: list[LoRARequest | None]) -> None:
    adapter = adapters[0]
    prompt = {"prompt_token_ids": PROMPTS[0]}
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=5, ignore_eos=True)
    (several,) = engine.generate([prompt], params, lora_request=adapter, use_tqdm=False)
    first = several.outputs[0]
    *_, last = engine.stream(
        prompt, SamplingParams(temperature=1, seed=3, max_tokens=5, ignore_eos=True), lora_request=adapter
    )
    assert last.outputs[0].token_ids == first.token_ids
    ways = [several.outputs[2].token_ids]
    (beams,) = engine.beam_search([prompt], 2, 5, ignore_eos=True, lora_request=adapter)
    ways.append(beams.outputs[0].token_ids)
    for tokens in ways:
        (score,) = engine.score([prompt], [tokens], lora_request=adapter, use_tqdm=False)
        (base,) = engine.score([prompt], [tokens], use_tqdm=False)
        assert score.logprobs != base.logprobs
    assert math.isclose(sum(score.logprobs), beams.outputs[0].cumulative_logprob or 0, rel_tol=1e-5)


def test_requests_of_asyncio(adapters: list[LoRARequest | None], expected: list[Result]) -> None:
    async def tokens(engine: AsyncCompiledEngine, i: int) -> list[int]:
        prompt = {"prompt_token_ids": PROMPTS[i]}
        *_, last = [output async for output in engine.generate(prompt, PARAMS, lora_request=adapters[i])]
        return last.outputs[0].token_ids

    async def all_of_them() -> list[list[int]]:
        async with AsyncCompiledEngine(str(checkpoint(MODEL)), dtype="bfloat16", **SIZES, **LORA) as engine:
            return await asyncio.gather(*(tokens(engine, i) for i in range(len(PROMPTS))))

    assert asyncio.run(all_of_them()) == [tokens for tokens, _ in expected]


def test_files_that_change_are_another_adapter(
    engine: CompiledEngine, adapters: list[LoRARequest | None], expected: list[Result], tmp_path: Path
) -> None:
    """Under the same name and path: nothing of the old one is used, in slots or KV blocks."""
    one, other = (Path(adapter.lora_path) for adapter in adapters[:2] if adapter)
    path = tmp_path / "adapter"
    shutil.copytree(one, path)
    request = LoRARequest("mine", str(path))
    assert results(engine, [request], range(1)) == expected[:1]
    shutil.rmtree(path)
    shutil.copytree(other, path)
    changed = results(engine, [request], range(1))
    engine.reset_prefix_cache()
    assert changed == results(engine, [adapters[1]], range(1))
    assert changed != expected[:1]


def test_a_bad_adapter_ends_its_own_requests_alone(
    engine: CompiledEngine, adapters: list[LoRARequest | None], expected: list[Result], tmp_path: Path
) -> None:
    bad = LoRARequest("bad", str(tmp_path))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
    refused, served = engine.generate(prompts, PARAMS, lora_request=[bad, adapters[1]], use_tqdm=False)
    assert refused.outputs[0].finish_reason == "error"
    assert "lora_path must be a directory with adapter_config.json" in str(refused.outputs[0].stop_reason)
    assert (served.outputs[0].token_ids, logprobs_of(served)) == expected[1]
    with pytest.raises(ValueError, match="lora_path must be"):
        engine.generate(prompts[0], PARAMS, lora_request=bad, raise_on_error=True, use_tqdm=False)
    with pytest.raises(ValueError, match="for each of 2 prompts"):
        engine.generate(prompts, PARAMS, lora_request=[bad], use_tqdm=False)


def test_after_a_fault_slots_are_filled_again(
    engine: CompiledEngine, adapters: list[LoRARequest | None], expected: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the fault was seen, nobody knows what was copied."""
    launch, loads = engine.runner.launch, list[tuple[int, str]]()

    def failing(output: SchedulerOutput) -> Any:
        loads.extend(output.adapter_loads)
        if len(loads) == 2 and not output.adapter_loads:
            loads.append((0, ""))
            raise RuntimeError("a fault")
        return launch(output)

    engine.reset_prefix_cache()
    results(engine, adapters, range(2, 3))  # evicts another one
    monkeypatch.setattr(engine.runner, "launch", failing)
    assert results(engine, adapters, range(2)) == expected[:2]
    assert len(loads) > 4
    assert len({digest for _, digest in loads}) == 3


def test_an_engine_without_adapters_refuses_them(adapters: list[LoRARequest | None]) -> None:
    with CompiledEngine(str(checkpoint(MODEL)), **SIZES) as engine, pytest.raises(ValueError, match="enable_lora=True"):
        engine.generate([PROMPTS[0]], PARAMS, lora_request=adapters[0], use_tqdm=False)


def test_a_step_is_one_graph(engine: CompiledEngine) -> None:
    check_one_graph(engine)


@pytest.mark.battery
def test_compiled_steps_have_the_same_bits(adapters: list[LoRARequest | None], expected: list[Result]) -> None:
    with CompiledEngine(
        str(checkpoint(MODEL)), **{"dtype": "bfloat16", **SIZES, **LORA, "enforce_eager": False}
    ) as engine:
        assert results(engine, adapters) == expected
        assert engine.compile_report().recompiles == 0
