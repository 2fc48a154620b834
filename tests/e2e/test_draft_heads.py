"""Heads that read the model's hidden states: outputs are those without, and drafts those of a plain-torch reference."""

import dataclasses
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.inputs import FeatureCache, HiddenCache
from compiled_llm.models.linears.quantized import Joined, Quantized
from compiled_llm.worker.draft_network import DraftPlan
from compiled_llm.worker.memory import num_bytes
from tests.draft_heads import (
    HEAD_CONFIG,
    Eagle3Reference,
    MedusaReference,
    eagle3_tensors,
    medusa_tensors,
    write_eagle3,
    write_head,
    write_medusa,
)
from tests.drafting_networks import Drafted, record_drafts
from tests.e2e.test_draft_model import ENGINES, SMALL, SWAP, Work, drafted_as_plain, random_work, serve
from tests.families import checkpoint

NUM_TOKENS = 3
LAYER_IDS = [0, 1, 2]
Reference = Eagle3Reference | MedusaReference
Made = tuple[str, str, Reference]  # method, directory, what it should draft


def of_authors(directory: Path, target: Path) -> Made:
    """With few tokens to draft, and the model's embedding."""
    config = {**HEAD_CONFIG, "draft_vocab_size": 90, "eagle_aux_hidden_state_layer_ids": LAYER_IDS}
    write_head(directory, config, eagle3_tensors(draft_vocab=90))
    return "eagle3", str(directory), Eagle3Reference(directory, target)


def of_speculators(directory: Path, target: Path) -> Made:
    """With an embedding of its own, the model's head, and the norms that this layout may have."""
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": HEAD_CONFIG,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
    }
    tensors = {name.replace("midlayer", "layers.0"): value for name, value in eagle3_tensors(1).items()}
    generator = torch.Generator().manual_seed(5)
    tensors["embed_tokens.weight"] = torch.randn(307, 112, generator=generator)
    tensors |= {f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(112, generator=generator) for i in range(3)}
    del tensors["lm_head.weight"]
    write_head(directory, config, tensors)
    return "eagle3", str(directory), Eagle3Reference(directory, target)


def with_one_norm(directory: Path, target: Path) -> Made:
    config = {**HEAD_CONFIG, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": LAYER_IDS}
    generator = torch.Generator().manual_seed(6)
    tensors = eagle3_tensors(2) | {"input_norm.weight": 1 + 0.3 * torch.randn(336, generator=generator)}
    write_head(directory, config, tensors)
    return "eagle3", str(directory), Eagle3Reference(directory, target)


def medusa_of_authors(directory: Path, target: Path) -> Made:
    tensors = medusa_tensors()
    generator = torch.Generator().manual_seed(7)
    tensors |= {f"{head}.2.weight": torch.randn(307, 112, generator=generator) for head in range(3)}
    write_head(directory, {"medusa_num_heads": 3, "medusa_num_layers": 2}, tensors)
    return "medusa", str(directory), MedusaReference(tensors, 2, target)


def medusa_of_vllm(directory: Path, target: Path) -> Made:
    tensors = medusa_tensors(num_blocks=1, bias=False, seed=3)
    generator = torch.Generator().manual_seed(8)
    tensors |= {f"{head}.1.weight": torch.randn(50, 112, generator=generator) for head in range(3)}
    tensors["token_map"] = torch.randperm(307, generator=generator)[:50]
    names = {f"{head}.0.linear.weight": f"blocks.{head}.layers.0.weight" for head in range(3)}
    names |= {f"{head}.1.weight": f"lm_heads.{head}.weight" for head in range(3)}
    config = {"num_heads": 3, "num_hidden_layers": 1, "truncated_vocab_size": 50, "vocab_size": 307, "hidden_size": 112}
    write_head(directory, config, {names.get(name, name): value for name, value in tensors.items()})
    return "medusa", str(directory), MedusaReference(tensors, 1, target)


MAKERS = (
    of_authors,
    of_speculators,
    pytest.param(with_one_norm, marks=pytest.mark.battery),
    medusa_of_authors,
    pytest.param(medusa_of_vllm, marks=pytest.mark.battery),
)


def config_of(method: str, directory: str) -> dict[str, Any]:
    return {"method": method, "model": directory, "num_speculative_tokens": NUM_TOKENS, "adaptive": False}


def wrong_drafts(found: list[Drafted], reference: Reference) -> list[str]:
    """Those that are not the reference's."""
    wrong, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # of small tensors; others would wait for each other
    for one in sorted(found, key=lambda one: -len(one.token_ids)):
        wanted = reference.drafts(one.token_ids, len(one.drafts), one.params, one.seed)
        if one.drafts != wanted:
            wrong.append(f"after {len(one.token_ids)} tokens {one.drafts} were drafted, not {wanted}")
    torch.set_num_threads(threads)
    return wrong


def unlike_prompts(count: int, length: int) -> list[list[int]]:
    """Prompts of which no two begin alike."""
    rng = random.Random(11)
    return [[3 + number, *(rng.randrange(3, 300) for _ in range(length + number % 5))] for number in range(count)]


def mixed(count: int) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True, "detokenize": False, "logprobs": 1}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "top_k": 40},
        {"temperature": 0.7, "seed": 6, "logit_bias": {9: 4.0}},
        {"temperature": 0.0, "allowed_token_ids": list(range(3, 200))},
    ]
    return [SamplingParams(**common | kinds[number % len(kinds)]) for number in range(count)]


@pytest.fixture(scope="module")
def plain() -> list:
    with CompiledEngine(str(checkpoint("llama")), **SMALL) as engine:
        return engine.generate(unlike_prompts(8, 9), mixed(8), use_tqdm=False)


@pytest.mark.parametrize("make", MAKERS)
def test_each_layout_drafts_what_plain_torch_says(make: Callable, plain: list, tmp_path: Path) -> None:
    """Prompts in chunks, several at a time, and preempted for want of blocks: the swapped blocks come back with all."""
    target = checkpoint("llama")
    method, directory, reference = make(tmp_path / "head", target)
    config = config_of(method, directory)
    with CompiledEngine(str(target), **SMALL | SWAP, speculative_config=config) as engine:
        found = record_drafts(engine)
        outputs = engine.generate(unlike_prompts(8, 9), mixed(8), use_tqdm=False)
        stats = engine.stats()
    assert [output.outputs for output in outputs] == [output.outputs for output in plain]
    assert stats.num_preemptions > 0
    assert len(found) > 60
    assert sum(len(one.drafts) == NUM_TOKENS for one in found) > 40
    assert wrong_drafts(found, reference) == []


@pytest.mark.parametrize("keeps_hidden", [True, False])
def test_drafts_after_a_prefix_hit_are_those_without(
    keeps_hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prefix that others computed without drafting; and of one after which another token follows than before.

    Also where features are kept, as on a GPU, in the place of the hidden states that they are made of.
    """
    monkeypatch.setattr(DraftPlan, "keeps_hidden", keeps_hidden)
    target = checkpoint("llama")
    _, directory, reference = of_speculators(tmp_path / "head", target)
    arguments = SMALL | {"num_kv_blocks": 60}
    prompt = [7 * place % 300 for place in range(3, 31)]
    params = SamplingParams(temperature=0.6, seed=3, max_tokens=10, ignore_eos=True, detokenize=False)
    with CompiledEngine(str(target), **arguments, speculative_config=config_of("eagle3", directory)) as engine:
        drafting = engine.own_runner.steps.drafting
        assert drafting is not None
        assert drafting.coverage is not None
        found = record_drafts(engine)
        engine.generate(prompt, dataclasses.replace(params, num_speculative_tokens=0), use_tqdm=False)
        assert not found
        assert isinstance(drafting.kv_cache[-1], HiddenCache if keeps_hidden else FeatureCache)
        for continued in (prompt, [*prompt[:16], 5, 6, 7], [*prompt[:16], 9, 5], [*prompt[:24], 8, 2], prompt):
            hits = engine.stats().prefix_hit_tokens
            engine.generate(continued, params, use_tqdm=False)
            assert engine.stats().prefix_hit_tokens > hits
    assert len(found) > 25
    assert wrong_drafts(found, reference) == []


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_head_that_must_be_right_always_is(method: str, tmp_path: Path) -> None:
    """All logits of model and head are zero: a sampled token follows from the noise, which both share."""
    target, tensors = tmp_path / "target", load_file(checkpoint("llama") / "model.safetensors")
    target.mkdir()
    (target / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    made: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
        "eagle3": ({**HEAD_CONFIG, "eagle_aux_hidden_state_layer_ids": LAYER_IDS}, eagle3_tensors()),
        "medusa": ({"medusa_num_heads": 3, "medusa_num_layers": 2}, medusa_tensors()),
    }
    config, of_head = made[method]
    of_head.pop("lm_head.weight", None)
    directory = write_head(tmp_path / "head", config, of_head)
    work: Work = [
        (prompt, SamplingParams(temperature=temperature, max_tokens=15, ignore_eos=True, detokenize=False, seed=number))
        for number, (prompt, temperature) in enumerate(zip(unlike_prompts(6, 5), (0.0, 1.0, 0.5) * 2, strict=True))
    ]
    with CompiledEngine(
        str(target), **SMALL | {"num_kv_blocks": 60}, speculative_config=config_of(method, directory)
    ) as engine:
        serve(engine, work)
        stats = engine.stats()
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 50


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("overlap", 24, id="small"),
        *(pytest.param(name, 300, id=f"full-{name}", marks=pytest.mark.battery) for name in ENGINES),
    ],
)
def test_outputs_are_those_without_it(name: str, count: int, tmp_path: Path) -> None:
    arguments, target = SMALL | ENGINES[name], checkpoint("llama")
    work = random_work(random.Random(7), count)
    directories = {"eagle3": write_eagle3(tmp_path / "head", target)}
    if count > 100:
        directories["medusa"] = medusa_of_authors(tmp_path / "medusa", target)[1]
    for method, directory in directories.items():
        made = drafted_as_plain(str(target), arguments, config_of(method, directory), work)
        assert made.stats.num_draft_tokens > count


@pytest.mark.parametrize("keeps_hidden", [True, False])
def test_each_function_is_one_graph_that_can_be_kept(
    keeps_hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Dynamo explains them, which traces a function and compiles nothing; and what one closes over is written."""
    target = checkpoint("llama")
    config = {"method": "eagle3", "model": write_eagle3(tmp_path / "head", target)}
    monkeypatch.setattr(DraftPlan, "keeps_hidden", keeps_hidden)
    with CompiledEngine(str(target), **SMALL | {"num_kv_blocks": 24}, speculative_config=config) as engine:
        drafting = engine.own_runner.steps.drafting
        assert drafting is not None
        parts = list({part.name: part for part in drafting._parts()}.values())
        assert len(parts) == 3 - keeps_hidden
        for part in parts:
            function = part.recipe()
            explained = torch._dynamo.explain(function)(*part.arguments())
            assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
            assert pickle.dumps([cell.cell_contents for cell in function.__closure__])


def test_its_memory_is_in_the_ledger(tmp_path: Path) -> None:
    """What is the model's own counts once; hidden states are part of the pool."""
    target = checkpoint("llama")
    directory = of_speculators(tmp_path / "head", target)[1]
    with CompiledEngine(str(target), **SMALL, speculative_config=config_of("eagle3", directory)) as engine:
        ledger, drafting = engine.memory_report(), engine.own_runner.steps.drafting
        assert drafting is not None
        (layer, kept), num_blocks = drafting.kv_cache, engine.stats().num_kv_blocks + 1
        assert kept.hidden.shape == (num_blocks, 4, 3 * 112)
        assert ledger.bytes_of("drafter's KV pool") == sum(x.nbytes for x in (layer.k, layer.v, kept.hidden))
    tensors = load_file(Path(directory) / "model.safetensors")
    own = sum(value.nbytes for value in tensors.values())
    assert own <= ledger.bytes_of("drafter's weights") < own + 307 * 112 * 4


def kinds_of(layer: Any) -> set[str]:
    """The formats of the linear layers in it; "" for those that are not quantised."""
    parts = layer.layers if isinstance(layer, Joined) else (layer,)
    return {part.scheme.form.element if isinstance(part, Quantized) else "" for part in parts}


@pytest.mark.parametrize(
    ("others", "asked", "expected"),
    [
        ({"dtype": "bfloat16"}, None, "int8"),
        ({"dtype": "float32"}, None, ""),
        ({"dtype": "bfloat16"}, "none", ""),
        ({"dtype": "float32"}, "int4_w4a8", "int4"),
    ],
)
def test_on_a_cpu_networks_and_the_head_that_they_share_are_in_8_bits(
    others: dict[str, Any], asked: str | None, expected: str, tmp_path: Path
) -> None:
    """Unless that is asked for, or float32; and no token is another one."""
    target = checkpoint("llama")
    made = {"eagle3": write_eagle3(tmp_path / "eagle3", target), "medusa": write_medusa(tmp_path / "medusa", target)}
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    arguments = {**SMALL, **others, "enforce_eager": True}
    with CompiledEngine(str(target), **arguments) as plain:
        tokens = plain.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    for method, directory in made.items():
        config = {"method": method, "model": directory, "quantization": asked, "adaptive": False}
        with CompiledEngine(str(target), **arguments, speculative_config=config) as engine:
            runner = engine.own_runner
            network, shared = runner.steps.drafting.network, runner.steps.weights.head
            weights = network.weights
            assert kinds_of(weights.head) == {"int8" if asked == "int4_w4a8" else expected}
            assert (weights.head is shared) == (not expected)
            layers = [weights.fc] if method == "eagle3" else [block for head in weights.layers for block in head]
            assert set().union(*map(kinds_of, layers)) == {expected}
            of_head = num_bytes(weights.head) if expected else 0
            assert network.nbytes > of_head
            assert engine.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == tokens


def test_a_head_that_is_quantised_is_shared_as_it_is(tmp_path: Path) -> None:
    target = checkpoint("llama")
    config = {"method": "eagle3", "model": write_eagle3(tmp_path / "eagle3", target)}
    arguments = {**SMALL, "dtype": "bfloat16", "quantization": "int8", "enforce_eager": True}
    with CompiledEngine(str(target), **arguments, speculative_config=config) as engine:
        steps = engine.own_runner.steps
        assert steps.drafting.network.weights.head is steps.weights.head
        assert kinds_of(steps.drafting.network.weights.fc) == {"int8"}
