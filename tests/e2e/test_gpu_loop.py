"""The loop for a GPU without one: the host waits for nothing but the end of a step, and tokens are those of a CPU."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.drafting.trees import NgramTrees
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker import compiled_steps, draft_trees
from compiled_llm.worker.device import say_cost_of_dtype
from tests.adapters.made import linear_modules, write_adapter
from tests.draft_heads import Eagle3Reference, write_eagle3
from tests.drafting_networks import draft_in_turns, inexact_copy, record_drafts
from tests.e2e.test_draft_heads import wrong_drafts
from tests.families import checkpoint, transformers_model
from tests.pretend_gpu import GPU, WaitError, pretended_gpu

SIZES: dict[str, Any] = {
    "bucket_sizes": (1, 4), "token_bucket_sizes": (8, 32), "max_model_len": 64, "num_kv_blocks": 8,
    "dtype": "float32", "enforce_eager": True,
}  # fmt: skip
SAME = list(range(3, 25))
PROMPTS = [[5], [9, 8, 7], list(range(3, 40)), SAME, [5, 6], SAME]


def params_of(number: int) -> SamplingParams:
    """One of every kind of request."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
        {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1},
        {"temperature": 0.8, "top_p": 0.9, "allowed_token_ids": tuple(range(300, 900)), "seed": 5},
        {"temperature": 1.0, "n": 2, "seed": 4, "presence_penalty": 0.4},
    ]
    return SamplingParams(max_tokens=20, ignore_eos=True, **kinds[number % len(kinds)])


def served(engine: CompiledEngine) -> tuple[list[Any], list[float]]:
    """Tokens, and the log-probabilities of all that were asked for."""
    outputs = engine.generate(PROMPTS, [params_of(n) for n in range(len(PROMPTS))], use_tqdm=False)
    rows = [out.prompt_logprobs for out in outputs] + [one.logprobs for out in outputs for one in out.outputs]
    logprobs = [one.logprob for row in rows for token in row or () for one in (token or {}).values()]
    return [[(one.token_ids, one.finish_reason) for one in out.outputs] for out in outputs], logprobs


@pytest.mark.parametrize("preemption_mode", [pytest.param("recompute", marks=pytest.mark.battery), "swap"])
def test_the_overlapped_loop_waits_for_the_ends_of_steps_alone(
    monkeypatch: pytest.MonkeyPatch, preemption_mode: str
) -> None:
    """With every kind of request, forks of blocks, preemptions and swaps."""
    sizes = SIZES | {"preemption_mode": preemption_mode, "swap_space_bytes": 2**22 * (preemption_mode == "swap")}
    with CompiledEngine(device="cpu", **sizes) as engine:
        expected = served(engine)
    with pretended_gpu(monkeypatch) as gpu, CompiledEngine(device="cuda", check_invariants=True, **sizes) as engine:
        assert engine.runner.steps.tables is not None
        gpu.serving, waits = True, gpu.num_waits
        found = served(engine)
        gpu.serving = False
        stats = engine.stats()
        assert gpu.num_waits - waits == stats.num_steps, "one wait a step"
        assert stats.num_preemptions > 0
    assert found[0] == expected[0]
    # Products are torch's here, and sums in another order.
    assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert len(found[1]) > 100
    assert gpu.num_sent >= stats.num_steps


@pytest.mark.battery  # the ordinary run has the line alone, below
def test_a_start_in_float32_says_in_one_line_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also where nobody asked for it: a config without a dtype means float32."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(DEMO_MODEL / "model.safetensors", tmp_path)
    sizes = SIZES | {"model": str(tmp_path), "dtype": "auto", "progress": "lines"}
    with pretended_gpu(monkeypatch), CompiledEngine(device="cuda", **sizes) as engine:
        assert engine.runner.dtype == torch.float32
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "twice the bytes" in line]
    assert said.startswith("compiled-llm: dtype='auto', which is float32 for this checkpoint, takes twice the bytes")
    assert "Give dtype='bfloat16'" in said


@pytest.mark.parametrize(
    ("device", "dtype", "count"),
    [("cuda", torch.float32, 1), ("cuda", torch.bfloat16, 0), ("cuda", torch.float16, 0), ("cpu", torch.float32, 0)],
)
def test_other_starts_have_no_such_line(device: str, dtype: torch.dtype, count: int) -> None:
    stream = io.StringIO()
    say_cost_of_dtype(StartProgress("lines", stream), torch.device(device), dtype, str(dtype)[6:])
    assert stream.getvalue().count("\n") == stream.getvalue().count("dtype='float32' takes twice") == count


@pytest.mark.parametrize("kind", ["windows", pytest.param("stream", marks=pytest.mark.battery)])
def test_tables_of_windows_are_on_the_gpu_too(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Those of a stream, whose window moves, come with the step."""
    if kind == "windows":
        sizes = SIZES | {"model": str(checkpoint("gemma3")), "num_kv_blocks": 24}
    else:
        moved = {"max_model_len": 256, "num_kv_blocks": 64, "enable_prefix_caching": False, "sliding_window": 32}
        sizes = SIZES | moved | {"attention_sink_tokens": 16, "max_num_batched_tokens": 32}
    params = SamplingParams(temperature=0, max_tokens=60 if kind == "stream" else 16, ignore_eos=True)
    prompts = [list(range(3, 30)), [9, 8, 7]]

    def tokens(engine: CompiledEngine) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in engine.generate(prompts, params, use_tqdm=False)]

    with CompiledEngine(device="cpu", **sizes) as engine:
        expected = tokens(engine)
    with pretended_gpu(monkeypatch) as gpu, CompiledEngine(device="cuda", check_invariants=True, **sizes) as engine:
        steps = engine.runner.steps
        assert steps.tables is not None
        assert len(steps.tables.tensors) == 2
        on_gpu = {tensor.data_ptr() for tensor in steps.tables.tensors}
        (window,) = steps.buffers[steps.buckets[0]].step_input.windows
        assert (window.block_table.data_ptr() in on_gpu) == (kind == "windows")
        gpu.serving = True
        assert tokens(engine) == expected
        gpu.serving = False


@pytest.mark.battery
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "glm4-moe", "gemma4-moe", "deepseek-v3", "mistral4"])
def test_experts_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch, family: str, dtype: str) -> None:
    """In 16 bits by the ops that are several of a CPU's."""
    sizes = SIZES | {"model": str(checkpoint(family)), "num_kv_blocks": 24, "dtype": dtype}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5], [9, 8, 7], list(range(3, 40))]

    def tokens(engine: CompiledEngine) -> list[int]:
        return [token for out in engine.generate(prompts, params, use_tqdm=False) for token in out.outputs[0].token_ids]

    with CompiledEngine(device="cpu", **sizes) as engine:
        expected = tokens(engine)
    with pretended_gpu(monkeypatch) as gpu, CompiledEngine(device="cuda", check_invariants=True, **sizes) as engine:
        gpu.serving = True
        found = tokens(engine)
        gpu.serving = False
    if dtype == "float32":
        assert found == expected
    else:  # torch's products round otherwise, and a request that differs once differs from there on
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        assert same >= len(expected) // 2


def test_what_a_host_would_wait_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch) as gpu:
        on_gpu, pinned = torch.zeros(4, device="cuda"), torch.zeros(4, pin_memory=True)
        gpu.serving = True
        for wait in (
            lambda: torch.tensor([1.0], device=GPU),
            lambda: on_gpu.sum().item(),
            lambda: on_gpu.cpu(),
            lambda: on_gpu.copy_(torch.zeros(4), non_blocking=True),
            lambda: on_gpu.copy_(pinned),
            lambda: torch.ones(3).to(GPU, non_blocking=True),
            lambda: on_gpu.__setitem__(torch.tensor([1]), 0.5),
            lambda: on_gpu.nonzero(),
        ):
            with pytest.raises(WaitError):
                wait()
        assert gpu.num_sent == 0
        on_gpu.copy_(pinned, non_blocking=True)
        pinned.fill_(2)
        with pytest.raises(AssertionError, match="while a copy from it was under way"):
            torch.cuda.synchronize()
        gpu.serving = False


@pytest.mark.battery
def test_trees_of_drafts_are_verified_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of a CPU without drafts, keys are moved, and the host waits for ends of steps alone."""
    sizes = SIZES | {"model": str(checkpoint("llama")), "num_kv_blocks": 40, "block_size": 8}
    config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "adaptive": False}
    config |= {"speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (2,), (0, 1)]"}
    prompts = [[5, 6, 5, 7, 5, 8] * 3, [8] * 20, [9, 10, 9, 11]]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 0.1, 0.4)]

    def tokens(engine: CompiledEngine) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in engine.generate(prompts, params, use_tqdm=False)]

    with CompiledEngine(device="cpu", **sizes) as engine:
        expected = tokens(engine)
    continuations, moved, move = NgramTrees.continuations, list[int](), draft_trees.move_accepted

    def wrong_first(*args: Any) -> list[tuple[str, float]]:
        return [("\x01", 1000.0), *continuations(*args)]

    monkeypatch.setattr(NgramTrees, "continuations", wrong_first)
    monkeypatch.setattr(compiled_steps, "move_accepted", lambda *args: (moved.append(1), move(*args)))
    arguments: dict[str, Any] = {**sizes, "check_invariants": True, "speculative_config": config}
    with pretended_gpu(monkeypatch) as gpu, CompiledEngine(device="cuda", **arguments) as engine:
        gpu.serving, waits = True, gpu.num_waits
        assert tokens(engine) == expected
        gpu.serving = False
        stats = engine.stats()
        assert gpu.num_waits - waits == stats.num_steps, "one wait a step"
    assert moved
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


@pytest.mark.battery
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "layer_skip"])
def test_a_network_drafts_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str) -> None:
    """Tokens are those of a CPU without drafts, some drafts are right, and the host waits for ends of steps alone."""
    family = "gemma3" if method == "layer_skip" else "llama"  # with windows, whose keys have places of their own
    sizes = SIZES | {"model": str(checkpoint(family)), "num_kv_blocks": 40, "block_size": 8}
    config: dict[str, Any] = {"method": method, "adaptive": False}
    reference = None
    if method == "draft_model":
        config["model"] = inexact_copy("llama", tmp_path / "draft")
    elif method == "eagle3":
        config["model"] = write_eagle3(tmp_path / "head", checkpoint(family))
        reference = Eagle3Reference(tmp_path / "head", checkpoint(family))
    else:
        config["num_draft_layers"] = 2
    prompts = [[5, 6, 7], [8] * 20, [9, 10]]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 0.5, 0.8)]

    def tokens(engine: CompiledEngine) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in engine.generate(prompts, params, use_tqdm=False)]

    with CompiledEngine(device="cpu", **sizes) as engine:
        expected = tokens(engine)
    arguments: dict[str, Any] = {**sizes, "check_invariants": True, "speculative_config": config}
    with pretended_gpu(monkeypatch) as gpu, CompiledEngine(device="cuda", **arguments) as engine:
        if reference is not None:
            draft_in_turns(engine)
        found = record_drafts(engine)
        gpu.serving, waits = True, gpu.num_waits
        assert tokens(engine) == expected
        gpu.serving = False
        stats = engine.stats()
        assert gpu.num_waits - waits == stats.num_steps, "one wait a step"
    if reference is not None:  # of random weights, which are hardly ever right
        assert len(found) > 5
        assert wrong_drafts(found, reference) == []
    else:
        assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


def test_decodes_without_adapters_have_steps_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of an engine without adapters; which of the two runs follows from the step's requests."""
    model, modules = str(checkpoint("qwen3")), linear_modules(transformers_model("qwen3"))
    adapter = LoRARequest("one", str(write_adapter(tmp_path / "one", modules)))
    sizes = SIZES | {"model": model, "num_kv_blocks": 24, "enable_lora": True, "max_lora_rank": 4}
    sizes |= {"bucket_sizes": (2,), "token_bucket_sizes": (8,)}
    params = [SamplingParams(temperature=0, max_tokens=size, ignore_eos=True) for size in (12, 5)]

    def tokens(engine: CompiledEngine, chosen: list[LoRARequest | None]) -> list[list[int]]:
        found = engine.generate([[5, 6], [9, 8, 7]], params, lora_request=chosen, use_tqdm=False, raise_on_error=True)
        return [out.outputs[0].token_ids for out in found]

    kinds: list[list[LoRARequest | None]] = [[None, None], [None, adapter], [adapter, adapter]]
    with CompiledEngine(device="cpu", **sizes) as engine:
        expected = [tokens(engine, chosen) for chosen in kinds]
    assert len({str(found[1]) for found in expected}) == 2
    with pretended_gpu(monkeypatch) as gpu, CompiledEngine(device="cuda", check_invariants=True, **sizes) as engine:
        steps, ran = engine.own_runner.steps, list[str]()
        names = [bucket.name for bucket in steps.buckets]
        assert names == ["decode_2", "decode_2_lora", "tokens_8"]
        run_step = steps.run_step
        monkeypatch.setattr(steps, "run_step", lambda bucket: (ran.append(bucket.name), run_step(bucket))[1])
        gpu.serving = True
        found = [(tokens(engine, chosen), {name for name in ran if "decode" in name}, ran.clear()) for chosen in kinds]
        gpu.serving = False
    assert [one[0] for one in found] == expected
    # One request decodes alone in the end, and has no adapter.
    assert [one[1] for one in found] == [{"decode_2"}, {"decode_2", "decode_2_lora"}, {"decode_2_lora"}]
