"""A model's own first layers draft, on its own KV cache: outputs are those without, drafts those of these layers."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from compiled_llm import CompiledEngine
from compiled_llm.api.config import EngineConfig
from compiled_llm.engine.preflight import look_at
from tests.drafting_networks import check_drafts, first_layers_of
from tests.e2e.test_draft_model import ENGINES, SMALL, drafted_as_plain, random_work, serve
from tests.families import checkpoint

CONFIG: dict[str, Any] = {"method": "layer_skip", "num_speculative_tokens": 3, "adaptive": False}
# Layers of a window and without; latents, experts, layers that read the keys of others, and positions that are learnt.
FAMILIES = {
    "gemma3": 2, "olmo3": 2, "mistral": 1, "deepseek-v2": 1, "qwen3-moe": 2, "gemma4": 3, "gpt2": 1, "gpt-oss": 1,
}  # fmt: skip
_UNCUT = ("gemma4", "gpt2")  # those whose config.json does not become that of fewer layers


@pytest.mark.parametrize(
    ("family", "name", "count"),
    [
        pytest.param("gemma3", "swap", 16, id="small"),
        *(pytest.param(family, "swap", 100, id=f"full-{family}", marks=pytest.mark.battery) for family in FAMILIES),
        *(pytest.param("gemma3", name, 200, id=f"full-{name}", marks=pytest.mark.battery) for name in ENGINES),
    ],
)
def test_outputs_are_those_without_it_and_it_drafts_what_these_layers_say(
    family: str, name: str, count: int, tmp_path: Path
) -> None:
    arguments, target, num_layers = SMALL | ENGINES[name], str(checkpoint(family)), FAMILIES[family]
    work, aborted = random_work(random.Random(7), count), frozenset(range(5, count, 11))
    config = CONFIG | {"num_draft_layers": num_layers}
    found, stats, report, memory, ledger = drafted_as_plain(target, arguments, config, work, aborted)
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_preemptions or name in ("no chunks", "no prefix cache, blocks of 1")
    assert arguments["enforce_eager"] or "draft" in {r.name for r in report.reports}
    # It has no weights and no cache.
    assert [row.name for row in ledger.rows] == [row.name for row in memory.rows]
    assert ledger.bytes_of("KV pool") == memory.bytes_of("KV pool")
    if family not in _UNCUT:
        of_layers = {key: arguments[key] for key in ("dtype", "kv_cache_dtype", "block_size") if key in arguments}
        check_drafts(found, first_layers_of(family, num_layers, tmp_path), **of_layers, max_model_len=128)


def test_layers_after_which_nothing_is_added_are_always_right(tmp_path: Path) -> None:
    source = checkpoint("llama")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{name}.weight"].zero_()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    work = [
        (prompt, dataclasses.replace(params, presence_penalty=0.0, stop_token_ids=None, ignore_eos=True))
        for prompt, params in random_work(random.Random(3), 12)
    ]
    with CompiledEngine(str(tmp_path), **SMALL | {"num_kv_blocks": 60}, speculative_config=CONFIG) as engine:
        serve(engine, work)
        stats = engine.stats()
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 50


def test_states_behind_the_layers_that_draft_stay_what_they_are(tmp_path: Path) -> None:
    """Layers with a state draft nothing, and are refused; others do, of the same model."""
    config = json.loads((checkpoint("lfm2") / "config.json").read_text())
    config["layer_types"] = ["full_attention", "full_attention", "conv", "conv"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = SMALL | {"load_format": "dummy", "num_kv_blocks": 40}
    work = random_work(random.Random(5), 12)
    made = drafted_as_plain(str(tmp_path), arguments, CONFIG | {"num_draft_layers": 2}, work)
    assert made.stats.num_draft_tokens > 50
    with pytest.raises(
        ValueError, match=r"num_draft_layers must be at most 2 for Lfm2.*layer 2 keeps a state.*given 3"
    ):
        CompiledEngine(str(tmp_path), **arguments, speculative_config=CONFIG | {"num_draft_layers": 3})


@pytest.mark.parametrize(
    ("family", "count", "text"),
    [
        ("llama", 2, "num_draft_layers must be at most 1, one less than the layers of LlamaForCausalLM, given 2"),
        ("lfm2", None, "num_draft_layers must be left out, and method another one for Lfm2ForCausalLM, whose layer 0"),
    ],
)
def test_layers_that_cannot_draft_are_refused(family: str, count: int | None, text: str) -> None:
    config = CONFIG | ({} if count is None else {"num_draft_layers": count})
    with pytest.raises(ValueError, match=rf"^speculative_config: {text}"):
        CompiledEngine(str(checkpoint(family)), **SMALL, speculative_config=config)


@pytest.mark.battery  # it takes seconds to record a model's code
def test_code_of_transformers_is_not_cut() -> None:
    error = pytest.raises(ValueError, match="method must be another one than 'layer_skip' for LlamaForCausalLM")
    with pytest.warns(UserWarning, match="transformers' modelling code"), error:
        CompiledEngine(str(checkpoint("llama")), **SMALL, model_impl="transformers", speculative_config=CONFIG)


def test_a_look_at_a_model_says_which_layers_draft() -> None:
    config = EngineConfig(model=str(checkpoint("llama")), **SMALL, speculative_config=CONFIG)
    assert dict(look_at(config))["drafts"].startswith("by the first 1 of 2 layers")
