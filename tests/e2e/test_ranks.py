"""Two ranks in whole engines: adapters, networks that draft, and everything at once."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.parallel.rank_processes import RankProcesses
from compiled_llm.worker import message
from tests.adapters.made import linear_modules, write_adapter
from tests.drafting_networks import inexact_copy, record_drafts
from tests.e2e.test_draft_heads import medusa_of_authors, of_authors, of_speculators
from tests.e2e.test_draft_model import SMALL, SWAP, Work, facts, random_work, serve
from tests.e2e.test_lora import LORA, SIZES, results
from tests.families import checkpoint, transformers_model
from tests.forked_workers import forked_workers  # noqa: F401 - a fixture
from tests.mtp_checkpoints import guessing_checkpoint

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "async_scheduling": True, "dtype": "float32"}
ADAPTED: dict[str, Any] = {**SIZES, **LORA, "num_kv_blocks": 24, **SWAP}
DRAFTING: dict[str, Any] = {**SMALL, **SWAP, **RANKS, "num_kv_blocks": 24}
REQUESTS, ABORTED = 40, frozenset({5, 16})


# -- Adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """For six requests: four adapters, which take turns in two slots, and none."""
    directory, modules = tmp_path_factory.mktemp("adapters"), linear_modules(transformers_model("qwen3"))
    ends = ("",), ("q_proj", "v_proj"), ("down_proj", "up_proj", "k_proj"), ("o_proj", "gate_proj")
    made = []
    for seed, chosen in enumerate(ends):
        own = {name: shape for name, shape in modules.items() if name.endswith(chosen)}
        made.append(LoRARequest(f"{seed}", str(write_adapter(directory / str(seed), own, seed=seed, r=8 - 2 * seed))))
    return [made[0], made[1], None, made[2], made[3], made[0]]


def check_adapters(adapters: list[LoRARequest | None], difference: float, one: Any, ranks: Any) -> None:
    """Twice, as each has lost its slot to others: tokens as of one process, log-probabilities so near."""
    model = str(checkpoint("qwen3"))
    with CompiledEngine(model, **{**ADAPTED, "dtype": "float32", **one}) as engine:
        wanted = results(engine, adapters)
    with CompiledEngine(model, **{**ADAPTED, **RANKS, **ranks}) as engine:
        found = results(engine, adapters)
        assert results(engine, adapters) == found
        report = engine.compile_report()
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(found, wanted, strict=True):
        assert tokens == wanted_tokens
        assert logprobs == pytest.approx(wanted_logprobs, abs=difference)
    assert report.graph_breaks == report.recompiles == 0


def test_adapters_of_two_ranks(adapters: list[LoRARequest | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are too large for a pipe, and some come through it."""
    sizes, send = list[int](), RankProcesses._send

    def noted(self: RankProcesses, content: Any, how: Any) -> list[Any]:
        if isinstance(content, list):
            sizes.append(sum(tensor.nbytes for one in content for change in one.changes.values() for tensor in change))
        return send(self, content, how)

    monkeypatch.setattr(RankProcesses, "_send", noted)
    check_adapters(adapters, 1e-4, {}, {})
    assert len(sizes) > 3, "adapters lost their slots, and came again"
    assert min(sizes) < message.MOST_IN_PIPE < max(sizes)


@pytest.mark.battery
def test_adapters_of_ranks_with_exact_sums_have_the_same_bits(adapters: list[LoRARequest | None]) -> None:
    exact = {"tensor_parallel_exact": True}
    check_adapters(adapters, 0.0, exact, exact)
    check_adapters(adapters, 0.0, exact, {**exact, "tensor_parallel_size": 4})


@pytest.mark.battery
def test_adapters_of_compiled_ranks(adapters: list[LoRARequest | None]) -> None:
    check_adapters(adapters, 1e-4, {}, {"enforce_eager": False})


# -- Drafts


def served(model: str, work: Work, **arguments: Any) -> tuple[dict[str, Any], Any, Any, list[Any]]:
    drafts = "speculative_config" in arguments
    if not drafts:
        work = [(prompt, dataclasses.replace(params, num_speculative_tokens=None)) for prompt, params in work]
    with CompiledEngine(model, **{**DRAFTING, **arguments}) as engine:
        found = record_drafts(engine) if drafts else []
        outputs = {name: facts(output) for name, output in serve(engine, work, ABORTED).items()}
        return outputs, engine.stats(), engine.compile_report(), found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    work = random_work(random.Random(7), REQUESTS)
    return served(str(checkpoint("llama")), work)[0]


def draft_model(directory: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": inexact_copy("llama", directory / "draft")}


def head(make: Callable[..., Any]) -> Callable[[Path], dict[str, Any]]:
    def config(directory: Path) -> dict[str, Any]:
        method, model, _ = make(directory / "head", checkpoint("llama"))
        return {"method": method, "model": model}

    return config


def layer_skip(directory: Path) -> dict[str, Any]:
    return {"method": "layer_skip", "num_draft_layers": 1}


@pytest.mark.battery
@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": False}, {"tensor_parallel_exact": True}], ids=str)
@pytest.mark.parametrize(
    "config", [draft_model, head(of_authors), head(of_speculators), head(medusa_of_authors), layer_skip]
)
def test_drafts_of_ranks(
    config: Callable[[Path], dict[str, Any]], arguments: dict[str, Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    """Outputs are those without drafts, and all ranks draft the same: their digests are compared."""
    work = random_work(random.Random(7), REQUESTS)
    speculation = {"num_speculative_tokens": 3, "adaptive": False} | config(tmp_path)
    model = str(checkpoint("llama"))
    drafted, stats, report, found = served(model, work, **arguments, speculative_config=speculation)
    wanted = served(model, work, **arguments)[0] if "tensor_parallel_exact" in arguments else plain
    assert drafted == wanted
    assert stats.num_accepted_draft_tokens > 0
    assert stats.num_swap_preemptions > 0
    assert len(found) > 50
    if arguments.get("enforce_eager") is False:
        assert {(one.graphs, one.graph_breaks, one.recompiles) for one in report.reports} == {(1, 0, 0)}
        assert {"draft (rank 0)", "draft (rank 1)"} <= {one.name for one in report.reports}


@pytest.mark.battery
def test_a_layer_of_the_models_own_drafts_for_ranks(tmp_path: Path) -> None:
    model, work = str(guessing_checkpoint("glm4-moe", tmp_path, 0.02)), random_work(random.Random(7), REQUESTS)
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    drafted, stats, _, found = served(model, work, speculative_config=speculation)
    assert drafted == served(model, work)[0]
    assert stats.num_accepted_draft_tokens > 0
    assert len(found) > 50


# -- All at once


@pytest.mark.battery
@pytest.mark.parametrize("method", ["ngram", "layer_skip"])
def test_everything_at_once_has_the_bits_of_one_rank(method: str, tmp_path: Path) -> None:
    """Chunks, preemption by swap, prefix hits, grammars, drafts, adapters, samples: with sums that are exact."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    modules = {name: shape for name, shape in linear_modules(model).items() if ".layers.0." in name}
    made = [LoRARequest(f"{seed}", str(write_adapter(tmp_path / f"{seed}", modules, seed=seed))) for seed in range(4)]
    rng = random.Random(3)
    starts = ["The ship went ", "Once upon a time there was a very long list of words, and ", "abc "]
    prompts = [rng.choice(starts) * rng.randint(1, 3) + str(rng.randrange(20)) for _ in range(60)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "seed": 4, "top_k": 9, "presence_penalty": 1.0},
        {"temperature": 1.0, "seed": 5, "structured_outputs": {"regex": "[a-c]{6}"}},
        {"temperature": 0.9, "seed": 6, "top_p": 0.9, "n": 2},
    ]
    params = [SamplingParams(max_tokens=16, logprobs=2, **rng.choice(kinds)) for _ in prompts]
    adapters = [rng.choice([None, *made]) for _ in prompts]
    draft = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    found = []
    for size in (1, 2):
        exact = {"tensor_parallel_size": size, "tensor_parallel_exact": True, "speculative_config": draft}
        with CompiledEngine(**{**DRAFTING, **LORA, "max_model_len": 96, "num_kv_blocks": 40, **exact}) as engine:
            outputs = engine.generate(prompts, params, lora_request=adapters, use_tqdm=False, raise_on_error=True)
            found.append([facts(output) for output in outputs])
            stats = engine.stats()
            for name in ("num_swap_preemptions", "prefix_hit_tokens", "num_accepted_draft_tokens"):
                assert getattr(stats, name) > 0, name
    assert found[0] == found[1]
