"""The step: a pure function of tensors, compiled once for each bucket. The model's forward, and the next tokens.

The likeliest tokens come out of the step itself; what some requests ask for besides runs after it: sampling, with or
without changed logits, and log-probabilities.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.registry import family
from compiled_llm.step.logits import LogitsInput, change_logits
from compiled_llm.step.logits_transforms import LogitsTransform
from compiled_llm.step.logprobs import LogprobRows, logprob_rows
from compiled_llm.step.sampling import SamplingInput, sample, sample_greedy


class Feedback(NamedTuple):
    """What a step leaves on the device, for the next step and for what runs behind it, without the host."""

    source: Tensor  # [T] int32 place in the step before of the token that stands here, or -1 where input_ids has it
    last_tokens: Tensor  # [R] int64, at least as long as any bucket's R; read, then overwritten with this step's
    hidden: Tensor  # [T, D], at least as long as any bucket's T; overwritten with what the head takes


def step_function(model_config: ModelConfig, max_query_len: int) -> Any:
    """The step of one bucket: a pure function (weights, step input, KV cache, feedback) -> logits [R, V].

    It leaves the most likely token of each row in ``feedback.last_tokens``, and what the logits were made of in
    ``feedback.hidden``.
    """
    model = family(model_config.architecture)
    forward, head, layers = model.forward, model.head, model.layers(model_config)

    def step(weights: Any, step_input: StepInput, kv_cache: KVCache, feedback: Feedback) -> Tensor:
        hidden = forward(weights, _fed_back(step_input, feedback), kv_cache, model_config, layers, max_query_len)
        feedback.hidden[: hidden.shape[0]] = hidden
        logits = head(weights, torch.index_select(hidden, 0, step_input.logits_indices), model_config)
        feedback.last_tokens[: logits.shape[0]] = sample_greedy(logits)
        return logits

    return step


def _fed_back(step_input: StepInput, feedback: Feedback) -> StepInput:
    """The step's input with the tokens that the step before sampled."""
    source, last_tokens = feedback.source, feedback.last_tokens
    # A step may have found no token (NO_TOKEN). What follows is dropped, but takes some token.
    fed_back = last_tokens[source.clamp(min=0)].clamp(min=0).to(step_input.input_ids.dtype)
    return step_input._replace(input_ids=torch.where(source >= 0, fed_back, step_input.input_ids))


# -- Behind the step, where some request asks for it


def sampler_function(logits: Tensor, params: SamplingInput, last_tokens: Tensor) -> None:
    """Sample each row, and leave its token in ``last_tokens`` in place of the most likely one."""
    last_tokens[: logits.shape[0]] = sample(logits, params)


def changing_sampler_function(transforms: tuple[LogitsTransform, ...]) -> Callable:
    """The same for logits that are changed before: (logits, params, what is wanted, token counts, last tokens).

    It also counts the tokens that it chose.
    """

    def changing_sampler(
        logits: Tensor, params: SamplingInput, wanted: LogitsInput, token_counts: Tensor, last_tokens: Tensor
    ) -> None:
        tokens = sample(change_logits(logits, wanted, params.position, token_counts, transforms), params)
        last_tokens[: logits.shape[0]] = tokens
        token_counts.index_put_((wanted.row, tokens.clamp(min=0)), wanted.is_due, accumulate=True)

    return changing_sampler


def logprobs_function(count: int) -> Callable:
    """Log-probabilities of the tokens chosen and the ``count`` likeliest: (logits, params, last tokens) -> rows."""

    def logprobs(logits: Tensor, params: SamplingInput, last_tokens: Tensor) -> LogprobRows:
        return logprob_rows(logits, last_tokens[: logits.shape[0]].clamp(min=0), count)

    return logprobs


def prompt_logprobs_function(model_config: ModelConfig, count: int) -> Callable:
    """The same for tokens of prompts: (weights, (places in hidden, tokens that follow them), hidden) -> rows."""

    head = family(model_config.architecture).head

    def prompt_logprobs(weights: Any, rows: tuple[Tensor, Tensor], hidden: Tensor) -> LogprobRows:
        indices, token_ids = rows
        logits = head(weights, torch.index_select(hidden, 0, indices), model_config)
        return logprob_rows(logits, token_ids, count)

    return prompt_logprobs
