"""The step: a pure function of tensors, compiled once for each bucket. The model's forward, and the next tokens.

As one function (``step_function``), or as three for ``compile_unit="layer"``, which do the same one after the other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models import family
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, LayerCache, StepInput
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
        logits = forward(weights, _fed_back(step_input, feedback), kv_cache, model_config, max_query_len)
        feedback.last_tokens[: logits.shape[0]] = sample_greedy(logits)
        return logits

    return step


def embed_function(model_config: ModelConfig) -> Any:
    """The step before its layers: (weights, step input, feedback) -> (stream, cosines and sines)."""
    embed_step = family(model_config.architecture).embed_step

    def embed(weights: Any, step_input: StepInput, feedback: Feedback) -> tuple[Any, Tensor]:
        return embed_step(weights, _fed_back(step_input, feedback))

    return embed


def layer_function(model_config: ModelConfig, max_query_len: int) -> Any:
    """Any layer of a step: (step input, stream, cosines and sines, layer's weights, layer's cache) -> stream."""
    layer_step = family(model_config.architecture).layer_step

    def layer(step_input: StepInput, stream: Any, cos_sin: Tensor, weights: Any, cache: LayerCache) -> Any:
        return layer_step(stream, cos_sin, weights, cache, step_input, model_config, max_query_len)

    return layer


def head_function(model_config: ModelConfig) -> Any:
    """The step after its layers: (weights, step input, stream, feedback) -> logits [R, V]; leaves the tokens too."""
    head_step = family(model_config.architecture).head_step

    def head(weights: Any, step_input: StepInput, stream: Any, feedback: Feedback) -> Tensor:
        logits = head_step(weights, stream, step_input, model_config)
        feedback.last_tokens[: logits.shape[0]] = sample_greedy(logits)
        return logits

    return head


def _fed_back(step_input: StepInput, feedback: Feedback) -> StepInput:
    """The step's input with the tokens that the step before sampled."""
    source, last_tokens = feedback
    fed_back = last_tokens[source.clamp(min=0)].to(step_input.input_ids.dtype)
    return step_input._replace(input_ids=torch.where(source >= 0, fed_back, step_input.input_ids))


def sampler_function(logits: Tensor, params: SamplingInput, last_tokens: Tensor) -> None:
    """Sample each row, and leave its token in ``last_tokens`` in place of the most likely one."""
    last_tokens[: logits.shape[0]] = sample(logits, params)
