"""The step: a pure function of tensors, compiled once for each bucket. The model's forward, and the next tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models import family
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.sampler import SamplingInput, sample, sample_greedy


class Feedback(NamedTuple):
    """How a step gets tokens that the step before sampled, without the host."""

    source: Tensor  # [T] int32 place in the step before, or -1 where input_ids has the token
    last_tokens: Tensor  # [R] int64, at least as long as any bucket's R; read, then overwritten with this step's


def step_function(model_config: ModelConfig, max_query_len: int) -> Any:
    """The step of one bucket: a pure function (weights, step input, KV cache, feedback) -> logits [R, V].

    It leaves the most likely token of each row in ``feedback.last_tokens``.
    """
    forward = family(model_config.architecture).forward

    def step(weights: Any, step_input: StepInput, kv_cache: KVCache, feedback: Feedback) -> Tensor:
        source, last_tokens = feedback
        fed_back = last_tokens[source.clamp(min=0)].to(step_input.input_ids.dtype)
        input_ids = torch.where(source >= 0, fed_back, step_input.input_ids)
        logits = forward(weights, step_input._replace(input_ids=input_ids), kv_cache, model_config, max_query_len)
        last_tokens[: logits.shape[0]] = sample_greedy(logits)
        return logits

    return step


def sampler_function(logits: Tensor, params: SamplingInput, last_tokens: Tensor) -> None:
    """Sample each row, and leave its token in ``last_tokens`` in place of the most likely one."""
    last_tokens[: logits.shape[0]] = sample(logits, params)
