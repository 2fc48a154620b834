"""Networks that draft, for tests: a draft model that is right now and then, and what it should have drafted."""

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.scheduling.request import Request
from tests.families import checkpoint


def inexact_copy(name: str, directory: Path, noise: float = 0.03) -> str:
    """The checkpoint ``name`` with noise on its matrices, as a share of their own spread; written to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    source = checkpoint(name)
    (directory / "config.json").write_text((source / "config.json").read_text())
    tensors = {
        key: value + noise * value.std() * torch.randn(value.shape, generator=generator) if value.ndim > 1 else value
        for key, value in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def first_layers_of(name: str, count: int, directory: Path) -> str:
    """The checkpoint ``name`` with its first ``count`` layers alone; written to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = describes(checkpoint(name))
    num_layers = config["num_hidden_layers"]
    by_layer = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == num_layers}
    by_layer.pop("architectures", None)
    config |= {"num_hidden_layers": count} | {key: value[:count] for key, value in by_layer.items()}
    (directory / "config.json").write_text(json.dumps(config))
    later = re.compile("|".join(rf"\.layers\.{place}\." for place in range(count, num_layers)))
    tensors = load_file(checkpoint(name) / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not later.search(key)}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What was drafted for a request that had these tokens."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    drafts: tuple[int, ...]


def record_drafts(engine: CompiledEngine) -> list[Drafted]:
    """A list that gets all drafts which come with the results of steps from now on."""
    found: list[Drafted] = []
    planner = engine.scheduler.drafts
    assert planner is not None
    take = planner.take

    def recording(requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        for request, tokens in zip(requests, drafts, strict=True):
            if tokens and request.finish_reason is None:
                known = *request.prompt_token_ids, *request.output_token_ids
                found.append(Drafted(known, request.sampling_params, request.seed, tuple(tokens)))
        take(requests, drafts)

    planner.take = recording  # type: ignore[method-assign]
    return found


def check_drafts(found: Sequence[Drafted], model: str, **arguments: Any) -> None:
    """Each draft is what ``model`` samples itself after the same tokens, at the same seed and positions: to the bit."""
    own = [
        dataclasses.replace(
            SamplingParams(
                temperature=one.params.temperature,
                top_p=one.params.top_p,
                top_k=one.params.top_k,
                min_p=one.params.min_p,
            ),
            seed=one.seed,
            max_tokens=len(one.drafts),
            ignore_eos=True,
            detokenize=False,
        )
        for one in found
    ]
    with CompiledEngine(model, enforce_eager=True, progress="off", **arguments) as engine:
        outputs = engine.generate([list(one.token_ids) for one in found], own, use_tqdm=False)
    for one, output in zip(found, outputs, strict=True):
        wanted = tuple(output.outputs[0].token_ids)
        assert one.drafts == wanted, f"after {len(one.token_ids)} tokens {one.drafts} were drafted, not {wanted}"


def describes(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def draft_in_turns(engine: CompiledEngine) -> None:
    """From now on nothing is drafted behind ten of each sixteen steps: as where it does not pay for a while."""
    planner, scheduler, number = engine.scheduler.drafts, engine.scheduler, itertools.count()
    assert planner is not None
    propose = planner.propose

    def proposing(*arguments: Any) -> None:
        pays = next(number) % 16 < 6
        for request in scheduler.running:
            request.takes_drafts = request.waits_for_tokens = pays
        propose(*arguments)

    planner.propose = proposing  # type: ignore[method-assign]
