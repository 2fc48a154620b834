"""``transformers.generate`` on the requests of a benchmark: batches padded on the left, greedy, exact lengths."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from workloads import Requests


class HuggingFaceModel(NamedTuple):
    """A model of transformers on a device."""

    module: Any
    device: torch.device


def load(directory: Path, dtype: str, device: torch.device, seed: int, *, random_weights: bool) -> HuggingFaceModel:
    """The checkpoint, or its config's shape with random weights. ``dtype`` "auto" is the checkpoint's own."""
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    if random_weights:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        torch.manual_seed(seed)
        with torch.device(device):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
    else:
        module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=kind, local_files_only=True)
    module.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)  # no end-of-text token
    return HuggingFaceModel(module.to(device).eval(), device)


def run(model: HuggingFaceModel, requests: Requests, max_batch_size: int) -> float:
    """Seconds that all requests take, ``max_batch_size`` at a time, each batch until its longest request is done."""
    started = time.perf_counter()
    for start in range(0, len(requests), max_batch_size):
        _run_batch(model, requests[start : start + max_batch_size])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - started


def _run_batch(model: HuggingFaceModel, batch: Requests) -> None:
    lengths = [len(request.prompt_token_ids) for request in batch]
    longest, new_tokens = max(lengths), max(request.output_len for request in batch)
    rows = [[0] * (longest - len(request.prompt_token_ids)) + request.prompt_token_ids for request in batch]
    masks = [[0] * (longest - length) + [1] * length for length in lengths]
    with torch.inference_mode():
        output = model.module.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(masks, device=model.device),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
    assert output.shape == (len(batch), longest + new_tokens)
