"""What each compiled function depends on, in the words of engine arguments and config.json: fields of its key.

The code that a function closes over and the specs of its arguments are in its key as well (``compiling/keys.py``). So
what two models have in common is shared by them, and nothing is shared that differs; these fields tell a reader why.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from compiled_llm.api.config import EngineLimits
from compiled_llm.models.config import ModelConfig


def of_step(
    model_config: ModelConfig,
    limits: EngineLimits,
    dtype: torch.dtype,
    cache_dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> dict[str, Any]:
    """Of the step. ``cache_dtypes``: of each layer's KV cache."""
    kinds = [str(layer) for layer in cache_dtypes]
    fields = {
        "model": dataclasses.asdict(model_config),
        "dtype": str(dtype),
        "kv_cache_dtypes": kinds[0] if len(set(kinds)) == 1 else kinds,
        "block_size": limits.block_size,
    }
    if device.type != "cpu":  # see ``StepSizes``
        fields |= {"max_model_len": limits.max_model_len, "largest_decode_bucket": limits.decode_bucket_sizes[-1]}
    return fields


def of_head(
    model_config: ModelConfig, limits: EngineLimits, dtype: torch.dtype, max_logprobs: int, device: torch.device
) -> dict[str, Any]:
    """Of the log-probabilities of prompts, which the model's head is part of."""
    fields = {"model": dataclasses.asdict(model_config), "dtype": str(dtype), "max_logprobs": max_logprobs}
    if device.type != "cpu":
        fields["max_model_len"] = limits.max_model_len  # so many positions the rotary tables among the weights have
    return fields


def of_sampling(dtype: torch.dtype, **sizes: int) -> dict[str, Any]:
    """Of what takes a step's logits: whatever model they are of. ``sizes``: those that it is not generic in."""
    return {"logits": str(dtype), **sizes}
