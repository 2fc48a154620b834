"""``transformers.generate`` on the requests of a benchmark: batches padded on the left, greedy, exact lengths."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from compiled_llm.bench.workloads import Timing

Batch = Sequence[tuple[list[int], int]]  # token ids of the prompt, tokens to generate


def load(directory: Path, dtype: str, device: torch.device, seed: int, *, random_weights: bool) -> Any:
    """transformers' model of a checkpoint, or random weights of its shape. ``dtype`` "auto" is the checkpoint's."""
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    if random_weights:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        kind = config.dtype if dtype == "auto" else kind
        torch.manual_seed(seed)
        with torch.device(device):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
    else:
        module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind, local_files_only=True)
    module.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)  # no end-of-text token
    return module.to(device).eval()


def run(model: Any, requests: Batch, max_batch_size: int) -> Timing:
    """All requests, ``max_batch_size`` at a time, each batch until its longest request is done."""
    seconds, ttfts, tpots = 0.0, list[float](), list[float]()
    for start in range(0, len(requests), max_batch_size):
        part = requests[start : start + max_batch_size]
        times = [step_end for step_end, _ in timed_tokens(model, part)]
        ttfts += [seconds + times[0]] * len(part)
        tpots += [(times[count - 1] - times[0]) / (count - 1) for _, count in part if count > 1]
        seconds += times[-1]
    return Timing(seconds, ttfts, tpots)


def generate(model: Any, batch: Batch, **options: Any) -> torch.Tensor:
    """One batch until its longest request is done: token ids, [requests, longest prompt + longest output] int64."""
    longest, new_tokens = max(len(prompt) for prompt, _ in batch), max(count for _, count in batch)

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=model.device)

    with torch.inference_mode():
        output = model.generate(
            padded([prompt for prompt, _ in batch]),
            attention_mask=padded([[1] * len(prompt) for prompt, _ in batch]),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            **options,
        )
    assert output.shape == (len(batch), longest + new_tokens)
    return output


def timed_tokens(model: Any, batch: Batch) -> list[tuple[float, list[int]]]:
    """Of each step: seconds from the start at its end, and the new token of each request."""
    found: list[tuple[float, list[int]]] = []
    never = torch.zeros(len(batch), dtype=torch.bool, device=model.device)

    def note(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        found.append((time.perf_counter() - started, ids[:, -1].tolist()))
        return never

    started = time.perf_counter()
    generate(model, batch, stopping_criteria=[note])
    return found
