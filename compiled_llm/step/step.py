"""The step: a pure function of tensors, compiled once for each bucket. The model's forward, and the next tokens.

The step itself gives the most likely tokens. What only some requests need runs after it: sampling, with or without
processed logits, and log-probabilities. Shapes: T tokens, R rows of logits, D hidden size, V vocabulary size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.taps import KeptTaps, Taps
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.last_rows import with_last_rows
from compiled_llm.models.layers.attention import for_queries, make_plans, with_plans, with_window_tables
from compiled_llm.models.linears.adapted import with_slots, with_slots_of_head
from compiled_llm.models.linears.vocabulary import OwnLogits, shared_head
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.models.stages import is_first, is_last, with_stream
from compiled_llm.ops import keep_greedy_tokens, keep_rows, rows_at
from compiled_llm.step.logits import LogitsInput, due_rows, process_logits
from compiled_llm.step.logits_transforms import LogitsTransform
from compiled_llm.step.logprobs import LogprobRows, logprob_rows
from compiled_llm.step.sampling import SamplingInput, sample


class Feedback(NamedTuple):
    """What a step leaves on the device for the next step, and for what runs after it."""

    source: Tensor  # [T] int32: the row of last_tokens that holds this input token, or -1 where input_ids holds it
    last_tokens: Tensor  # [R] int64, at least as long as any bucket's R; read, then overwritten with this step's
    hidden: Tensor  # [T, D], at least as long as any bucket's T; overwritten with what the head takes, or rows of that
    taken: Tensor | None = None  # [T, taps * D], as long; overwritten with the inputs of the layers ``taps``
    kept: Tensor | None = None  # [B, S, taps * D], of a KV cache: these go to the slots of their tokens


def step_function(
    model_config: ModelConfig,
    max_query_len: int,
    exact: bool = False,
    windows: tuple[int, ...] = (),
    taps: tuple[int, ...] = (),
) -> Any:
    """The step of one bucket: a pure function (weights, step input, KV cache, feedback) -> logits [R, V].

    Of several ranks each gives the logits of its own tokens; see ``shared_head``.

    It leaves the most likely token of each row in ``feedback.last_tokens``, and what the logits were made of in
    ``feedback.hidden``. A stage begins with what the one before it has left in ``feedback.hidden``; another than the
    last returns what the next one begins with, ``[T, D]``. ``exact``: see ``AttentionSpec``. ``windows``: those of
    ``StepInput.windows``. ``taps``: see ``HeadFamily``; what is read there goes to ``feedback.taken``,
    or to ``feedback.kept``, as what the last layer gave without taps.
    """
    model = family_of(model_config)
    forward, head = model.forward, model.head
    layers = with_window_tables(layers_of(model_config), windows)
    layers = for_queries(layers, max_query_len, exact=exact)
    # On a GPU it is found once for all layers which program attends to which keys (``DecodePlan``).
    planned = with_plans(layers) if max_query_len == 1 and not exact else None
    begins, ends = is_first(model_config), is_last(model_config)

    def step(weights: Any, step_input: StepInput, kv_cache: KVCache, feedback: Feedback) -> Tensor:
        step_input = _fed_back(step_input, feedback)
        own = with_own_tables(step_input)
        of_head = weights
        slots, of_kept = own.adapter_slots, None
        if slots is not None:
            of_kept = slots if own.kept_rows is None else torch.index_select(slots, 0, own.kept_rows)
            of_head = with_slots_of_head(weights, of_kept, own.logits_indices)
            weights = with_slots(weights, slots)
        kept = feedback.kept
        read = Taps(taps) if kept is None else KeptTaps(taps, kept, step_input.slot_mapping)
        tapped = read.on(weights) if taps else weights
        if not begins:
            tapped = with_stream(tapped, feedback.hidden.narrow(0, 0, step_input.input_ids.shape[0]))
        if own.kept_rows is not None:
            reads_all = feedback.taken is not None or (kept is not None and not read.ends_before(weights))
            assert not reads_all, "a drafter reads all rows"
            of_rows = with_last_rows(tapped, own.kept_rows, of_kept)
            hidden = forward(tapped if of_rows is None else of_rows, own, kv_cache, model_config, layers)
            hidden = rows_at(hidden, own.kept_rows) if of_rows is None else hidden
        elif planned is None or not step_input.seq_lens.is_cuda:
            hidden = forward(tapped, own, kv_cache, model_config, layers)
        else:
            plans = make_plans(planned, step_input, kv_cache, feedback.hidden.element_size())
            hidden = forward(tapped, own._replace(plans=plans), kv_cache, model_config, planned)
        if feedback.taken is not None:
            feedback.taken.narrow(0, 0, hidden.shape[0]).copy_(read.taken(hidden))
        if not ends:
            return hidden
        rows = keep_rows(hidden, step_input.logits_indices, feedback.hidden)
        if isinstance(read, KeptTaps):  # here, as the ops of the head follow, and torch's code came before
            read.keep_last(feedback.hidden.narrow(0, 0, hidden.shape[0]))
        shared = shared_head(of_head)
        if shared is not None:
            of_head = of_head._replace(head=OwnLogits(shared))
        logits = head(of_head, rows, model_config)
        keep_greedy_tokens(logits, feedback.last_tokens)
        if shared is not None:
            shared.join_greedy(logits, _of_rows(feedback.last_tokens, logits))
        return logits

    return step


def with_own_tables(step_input: StepInput) -> StepInput:
    """The step's input with block tables of its own requests, picked from those of all."""
    rows = step_input.table_rows
    if rows is None:
        return step_input
    windows = tuple(
        # A stream's table is another one each time its window moves: it comes with the step.
        window._replace(block_table=torch.index_select(window.block_table, 0, rows))
        if window.seq_lens is None
        else window
        for window in step_input.windows
    )
    return step_input._replace(block_table=torch.index_select(step_input.block_table, 0, rows), windows=windows)


def _fed_back(step_input: StepInput, feedback: Feedback) -> StepInput:
    """The step's input with the tokens that the previous step sampled."""
    source, last_tokens = feedback.source, feedback.last_tokens
    # A step may have found no token (NO_TOKEN). What follows is dropped, but takes some token.
    fed_back = last_tokens[source.clamp(min=0)].clamp(min=0).to(step_input.input_ids.dtype)
    return step_input._replace(input_ids=torch.where(source >= 0, fed_back, step_input.input_ids))


# -- After the step, where a request of it needs them


def _of_rows(last_tokens: Tensor, logits: Tensor) -> Tensor:
    """The first of them, one for each row of logits: a view. Torch 2.11 cannot trace a slice of a dynamic size."""
    return last_tokens.narrow(0, 0, logits.shape[0])


def sampler_function(logits: Tensor, params: SamplingInput, last_tokens: Tensor) -> None:
    """Sample each row of logits ``[R, V]``; its token replaces the most likely one in ``last_tokens``, int64."""
    _of_rows(last_tokens, logits).copy_(sample(logits, params))


def processing_sampler_function(transforms: tuple[LogitsTransform, ...], num_draft_tokens: int = 0) -> Callable:
    """Sample after ``process_logits``: (logits, params, inputs, token counts [rows, V] float32, last tokens) -> None.

    It adds the tokens that it chose to the counts; of rows after drafts, as far as those were right.
    """

    def processing_sampler(
        logits: Tensor, params: SamplingInput, inputs: LogitsInput, token_counts: Tensor, last_tokens: Tensor
    ) -> None:
        processed = process_logits(logits, inputs, params.position, token_counts, transforms, num_draft_tokens)
        tokens = sample(processed, params)
        _of_rows(last_tokens, logits).copy_(tokens)
        due = due_rows(tokens, inputs, num_draft_tokens)
        token_counts.index_put_((inputs.row, tokens.clamp(min=0)), due, accumulate=True)

    return processing_sampler


def logprobs_function(count: int) -> Callable:
    """Log-probabilities of the chosen and the ``count`` most likely tokens: (logits, params, last tokens) -> rows."""

    def logprobs(logits: Tensor, params: SamplingInput, last_tokens: Tensor) -> LogprobRows:
        return logprob_rows(logits, _of_rows(last_tokens, logits).clamp(min=0), count)

    return logprobs


def prompt_logprobs_function(model_config: ModelConfig, count: int) -> Callable:
    """Log-probabilities of prompts: (weights, (rows of hidden, the tokens that follow them, slots), hidden) -> rows.

    The slots are those of the rows' adapters, where the engine serves adapters.
    """

    head = family_of(model_config).head

    def prompt_logprobs(weights: Any, rows: tuple[Tensor, ...], hidden: Tensor) -> LogprobRows:
        indices, token_ids, *slots = rows
        weights = with_slots_of_head(weights, *slots) if slots else weights
        logits = head(weights, torch.index_select(hidden, 0, indices), model_config)
        return logprob_rows(logits, token_ids, count)

    return prompt_logprobs
