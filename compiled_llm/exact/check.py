"""Serve the matrix on a model, and find the first difference: what ``compiled-llm exact`` runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from compiled_llm.adapters.peft_config import PeftConfig
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.exact.locate import Departure, locate
from compiled_llm.exact.matrix import KINDS, Outcome, Request, Setting, make_requests, run_matrix, settings_of
from compiled_llm.models.config_file import read_config
from compiled_llm.worker.device import resolve_device

MOST_TOKENS = 1024  # of a request


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is served, and how an engine is made for a setting."""

    settings: list[Setting]
    requests: list[Request]
    arguments: dict[str, Any]
    device: torch.device

    def engine(self, setting: Setting) -> CompiledEngine:
        return CompiledEngine(**self.arguments, **setting.arguments(self.requests))


@dataclasses.dataclass(frozen=True)
class First:
    """The first difference: of which request, in which settings, and where it begins."""

    outcome: Outcome
    request: int
    departure: Departure | None

    def __str__(self) -> str:
        setting, place = self.outcome.setting, self.outcome.differing[self.request]
        begins = self.departure or (
            "no op of the step differed when both were run again: it is what runs after the step (sampling, "
            "log-probabilities), or it does not come each time"
        )
        return (
            f"first difference: request {self.request}, {place}\n"
            f"  in      {setting}\n  against {self.outcome.reference}\n  begins  {begins}"
        )

    def as_json(self) -> dict[str, Any]:
        place = self.outcome.differing[self.request]
        return {
            "request": self.request,
            "position": place.position,
            "what": KINDS[place.kind],
            "setting": str(self.outcome.setting),
            "reference": str(self.outcome.reference),
            "begins": self.departure and self.departure.as_json(),
        }


def make_plan(
    arguments: Mapping[str, Any],
    num_requests: int,
    num_tokens: int,
    kv_cache_dtypes: Sequence[str],
    sizes: Sequence[str],
    adapters: Sequence[str] = (),
) -> Plan:
    """The settings and requests for a model.

    Args:
        arguments: of the engine, such as ``model``, ``dtype`` and ``seed``.
        num_tokens: of each output.
        sizes: names of ``SIZES``.
        adapters: directories of adapters that requests have in turn. They have a slot less than there are of them, and
            one stays in host memory, so that each is evicted, and read and loaded again.

    Raises:
        ValueError: the engine would refuse an argument, or ``num_tokens`` are more than a request may have.
    """
    if adapters:
        of_adapters = {"enable_lora": True, "max_loras": max(1, len(adapters) - 1), "max_cpu_loras": 1}
        whole = sum(bool(PeftConfig.read(Path(path)).saved) for path in adapters)
        if whole:
            of_adapters["max_lora_modules_to_save"] = min(whole, of_adapters["max_loras"])
        arguments = {**arguments, **of_adapters}
    config = EngineConfig(**arguments)
    for name in kv_cache_dtypes:
        dataclasses.replace(config, kv_cache_dtype=name)  # which checks the name
    directory = checkpoint_directory(config)
    model = read_config(directory)
    most = min(model.max_position_embeddings, MOST_TOKENS)
    if num_tokens >= most:
        raise ValueError(f"--tokens must be below {most}, given {num_tokens}")
    tokenizer = load_tokenizer(config, directory)
    lora_requests = [LoRARequest(f"adapter {number}", path) for number, path in enumerate(adapters, 1)]
    sizes_of_model = model.vocab_size, num_requests, num_tokens, most
    requests = make_requests(tokenizer, *sizes_of_model, config.seed, lora_requests)
    device = resolve_device(config.device)
    modes = (True,) if device.type == "cuda" else (True, False)
    settings = settings_of(kv_cache_dtypes, sizes, modes)
    return Plan(settings, requests, {**arguments, "progress": "off", "exact": True}, device)


def check(plan: Plan, disable_bar: bool | None = None) -> tuple[list[Outcome], First | None]:
    """Serve all settings; the outcomes, and the first difference if there is one."""
    with tqdm(total=len(plan.settings), unit="setting", disable=disable_bar, leave=False) as bar:
        outcomes = []
        for outcome in run_matrix(plan.settings, plan.requests, plan.engine):
            outcomes.append(outcome)
            bar.update()
    worst = next((outcome for outcome in outcomes if outcome.differing), None)
    if worst is None:
        return outcomes, None
    request = min(worst.differing, key=lambda index: (worst.differing[index], index))
    departure = locate(worst.reference, worst.setting, plan.requests, request, plan.engine)
    return outcomes, First(worst, request, departure)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """A line of the table."""
    setting, compared = outcome.setting, outcome.compared
    return {
        "KV cache": setting.kv_cache,
        "buckets": setting.sizes,
        "run": "compiled" if setting.compiled else "eager",
        "company": setting.company,
        "cache": "warm" if setting.warm else "cold",
        "memory": setting.way,
        "requests": outcome.requests,
        "preempted": outcome.preemptions,
        "cached tokens": outcome.cached_tokens,
        **({} if outcome.reloads is None else {"adapters again": outcome.reloads}),
        "logits": compared["logits"],
        "all compared": sum(compared.values()),
        "result": f"{len(outcome.differing)} differ" if outcome.differing else outcome.missing or "equal",
    }


def result_of(outcomes: Sequence[Outcome], first: First | None) -> dict[str, Any]:
    """The verdict ("equal", "different" or "not proven"), counts of all settings, and the first difference."""
    not_proven = any(outcome.missing for outcome in outcomes)
    return {
        "verdict": "different" if first is not None else "not proven" if not_proven else "equal",
        "settings": len(outcomes),
        "requests": sum(outcome.requests for outcome in outcomes),
        "preempted": sum(outcome.preemptions for outcome in outcomes),
        "logits": sum(outcome.compared["logits"] for outcome in outcomes),
        "all_compared": sum(sum(outcome.compared.values()) for outcome in outcomes),
        "first_difference": first and first.as_json(),
    }
