"""Trees that networks draft: outputs are those without, and first ranks are what a chain would draft."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.drafting.trees import NetworkTrees, _families
from tests.draft_heads import Eagle3Reference, MedusaReference
from tests.drafting_networks import Drafted, check_drafts, record_drafts

DRAFTERS = Path(DEMO_MODEL).with_name("demo_drafters")
ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True, "bucket_sizes": (2,), "block_size": 8, "max_model_len": 128, "num_kv_blocks": 40,
    "check_invariants": True, "progress": "off", "num_threads": 1, "dtype": "float32",
}  # fmt: skip
PROMPTS = [
    "def area(width, height):\n    return width * height\n\n\ndef area(",
    "for row in rows:\n    print(row)\nfor",
]
PARAMS = [
    SamplingParams(temperature=t, seed=seed, max_tokens=24, ignore_eos=True, logprobs=1)
    for seed, t in enumerate((0.0, 0.8))
]
Outputs = list[tuple[list[int], Any]]


def outputs_of(engine: CompiledEngine) -> Outputs:
    outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]


@pytest.fixture(scope="module")
def plain() -> Outputs:
    with CompiledEngine(str(DEMO_MODEL), **ARGUMENTS) as engine:
        return outputs_of(engine)


def first_path(columns: tuple[int, ...], config: SpeculativeConfig) -> tuple[int, ...]:
    """Of what came of a network, the first token after the last one, the first after that, as far as there are some."""
    tree, path = config.network_tree, list[int]()
    assert tree is not None
    if config.method == "medusa":
        return columns[: len(columns) // 2 : tree.ranks]
    families, node = _families(columns), 0
    while node in families:
        token, _, node = families[node][0]
        path.append(token)
    return tuple(path)


def gone_on_from(one: Drafted) -> list[tuple[tuple[int, ...], int]]:
    """Of the nodes of levels that a network went on from, the path to each, and the first token after it."""
    families = _families(one.drafts)
    found: list[tuple[tuple[int, ...], int]] = []
    waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for node, path in waiting:
        children = families.get(node, [])
        if children:
            found.append((path, children[0][0]))
        waiting += [(child, (*path, token)) for token, _, child in children]
    return found


@pytest.mark.parametrize("method", ["medusa", "eagle3", "draft_model"])
def test_the_first_ranks_are_a_chains_drafts(method: str, plain: Outputs) -> None:
    """After accepted paths of trees, too: the network has read the right keys and hidden states."""
    directory = DRAFTERS / method
    given = {"method": method, "model": str(directory), "num_speculative_tokens": 24, "adaptive": False}
    config = SpeculativeConfig(**given, speculative_token_tree="auto")
    with CompiledEngine(str(DEMO_MODEL), **ARGUMENTS, speculative_config=config) as engine:
        assert isinstance(engine.scheduler.drafts.source, NetworkTrees)
        found = record_drafts(engine)
        assert outputs_of(engine) == plain
        stats = engine.stats()
    assert stats.num_accepted_by_position[1] > 0, "no path was longer than a token"
    assert stats.num_steps < 24
    chains = [dataclasses.replace(one, drafts=first_path(one.drafts, config)) for one in found]
    assert len(chains) > 12
    every = [] if method == "medusa" else [(one, *node) for one in found[::4] for node in gone_on_from(one)]
    if method == "draft_model":
        own = {name: value for name, value in ARGUMENTS.items() if name not in ("enforce_eager", "progress")}
        chains += [
            dataclasses.replace(one, token_ids=(*one.token_ids, *path), drafts=(token,)) for one, path, token in every
        ]
        check_drafts(chains, str(directory), **own)
    else:
        reference = reference_of(method)
        check_with(reference, chains)
        for one, path, token in every:
            wanted = reference.drafts(one.token_ids, len(path) + 1, one.params, one.seed, path)
            assert (*path, token) == wanted, f"after {len(one.token_ids)} tokens"
    assert method == "medusa" or len(every) > 50


def reference_of(method: str) -> Eagle3Reference | MedusaReference:
    tensors = {name: x.float() for name, x in load_file(DRAFTERS / method / "model.safetensors").items()}
    if method == "medusa":  # by the names of the authors' layout
        tensors = {re.sub(r"blocks\.(\d)\.layers\.(\d)", r"\1.\2.linear", name): x for name, x in tensors.items()}
        num_blocks = json.loads((DRAFTERS / method / "config.json").read_text())["num_hidden_layers"]
        return MedusaReference(tensors, num_blocks, Path(DEMO_MODEL))
    reference = Eagle3Reference(DRAFTERS / method, Path(DEMO_MODEL))
    reference.tensors = tensors
    reference.head, reference.embedding = reference.head.float(), reference.embedding.float()
    return reference


def check_with(reference: Eagle3Reference | MedusaReference, chains: list[Drafted]) -> None:
    for one in chains:
        wanted = reference.drafts(one.token_ids, len(one.drafts), one.params, one.seed)
        assert one.drafts == wanted, f"after {len(one.token_ids)} tokens"


def test_a_shape_of_heads(plain: Outputs) -> None:
    shape = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
    given = {"method": "medusa", "model": str(DRAFTERS / "medusa"), "speculative_token_tree": shape}
    with CompiledEngine(str(DEMO_MODEL), **ARGUMENTS, speculative_config={**given, "adaptive": False}) as engine:
        assert outputs_of(engine) == plain
        stats = engine.stats()
    assert 4 * stats.num_drafts < stats.num_draft_tokens <= 6 * stats.num_drafts
    assert stats.num_accepted_draft_tokens > 0
    with pytest.raises(ValueError, match="speculative_token_tree must have paths of at most 4, the heads of"):
        CompiledEngine(
            str(DEMO_MODEL),
            **ARGUMENTS,
            speculative_config={**given, "speculative_token_tree": "[(0,), (0,0), (0,0,0), (0,0,0,0), (0,0,0,0,0)]"},
        )
