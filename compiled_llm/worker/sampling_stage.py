"""SamplingStage: the compiled functions that run after a step, if some request needs more than the likeliest token.

There are three: sampling, sampling of changed logits, log-probabilities; where torch records CUDA graphs, these for
each number of rows. And one for the log-probabilities of prompts. All are compiled at the start. Which of them run
follows from the requests of a step, so a step whose requests are all greedy runs none.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.speculative_config import MOST_DRAFT_TOKENS
from compiled_llm.compiling.build_processes import Job
from compiled_llm.compiling.cuda_graphs import begin_step_of_trees
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.vocabulary import VocabularyRows
from compiled_llm.ops import native
from compiled_llm.ops.pinned import on_device
from compiled_llm.ops.torch_private import mark_static_address
from compiled_llm.scheduling.bucket import Bucket, buckets_of
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.step.logits import DraftRows, LogitsInput, TreeRows
from compiled_llm.step.logits_transforms import LogitsTransform
from compiled_llm.step.logprobs import LogprobRows, bytes_of_row, sorts_chunks
from compiled_llm.step.mask_words import num_mask_words
from compiled_llm.step.parameters import logits_parameters
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.step.step import (
    logprobs_function,
    processing_sampler_function,
    prompt_logprobs_function,
    sampler_function,
)
from compiled_llm.worker import graph_fields
from compiled_llm.worker.field_buffers import FieldBuffers, Fields
from compiled_llm.worker.rank_sampling import RankSampling, Recipe
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.sized_inputs import SizedInputs
from compiled_llm.worker.step_buffers import StepSizes, logits_rows, mark_sizes

# (function, name, what it depends on, keep) -> the function, compiled for the engine's device. With ``keep=False`` it
# is not kept on disk, where a change in a user's code would not be seen.
Make = Callable[..., CompiledFunction]
# The functions that run after a step, and the one that runs between. Only CUDA graph trees tell the pairs apart.
_KINDS = (("sample", None), ("sample_changed", None), ("logprobs", None))
_PATHS_OF_TREES = (*_KINDS, ("logprobs", "sample"), ("logprobs", "sample_changed"))
_MOST_PROMPT_ROWS = 64  # tokens of prompts at a time
_MOST_PROMPT_LOGITS = 1 << 22  # of these on a CPU: 16 MiB in float32, and more to compute with


class SamplingNeeds(NamedTuple):
    """What the requests of a step need besides the likeliest token."""

    sampling: bool
    changed_logits: bool  # sampled in any case
    logprobs: bool

    @classmethod
    def of(cls, rows: np.ndarray, is_sampled: Sequence[bool], store: RequestRows) -> "SamplingNeeds":
        """``is_sampled``: of each of ``rows`` [R] int64, whether the step samples a token of its request."""
        sampled = rows[np.array(is_sampled, dtype=bool)]
        return cls(
            sampling=bool(store.parameters["temperature"][sampled].any()),
            changed_logits=bool(store.changes_logits[sampled].any()),
            logprobs=bool(store.needs_logprobs[sampled].any()),
        )


class SamplingStage:
    """Owns these functions, their inputs on the device, and the counts of tokens that penalties are made of.

    Args:
        last_tokens: ``[R]`` int64, where a step leaves its tokens.
        hidden: ``[T, D]`` in the model's dtype, where it leaves the input of the head.
        max_logprobs: most likely tokens whose log-probabilities are computed.
        dtype: of logits.
        head: of the model, where a step of several ranks gives the logits of a rank's own tokens.
        uses_trees: whether torch's CUDA graph trees record what runs here. Else a function serves all numbers of rows.
        records: whether the engine records CUDA graphs of it, which are replayed on the tensors of the recording.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        limits: EngineLimits,
        device: torch.device,
        *,
        last_tokens: Tensor,
        hidden: Tensor,
        transforms: tuple[LogitsTransform, ...],
        max_logprobs: int,
        dtype: torch.dtype,
        uses_trees: bool = False,
        records: bool = False,
        head: VocabularyRows | None = None,
    ) -> None:
        self._uses_trees, self._records = uses_trees, records
        self._gathered: dict[int, Tensor] = {}  # rows -> all logits of a step that records, in memory of the most rows
        self._paths = _PATHS_OF_TREES if uses_trees else _KINDS
        self._device = device
        self._sizes = StepSizes.of(limits, device, uses_trees)
        vocab_size = model_config.vocab_size
        if self._sizes.vocabulary is not None and not (
            sorts_chunks(vocab_size, max_logprobs) and sorts_chunks(self._sizes.vocabulary.example, max_logprobs)
        ):
            self._sizes = self._sizes._replace(vocabulary=None, mask_words=None)
        # One function for many numbers of drafts: each is compiled for long.
        most_drafts = next(most for most in (0, 15, MOST_DRAFT_TOKENS) if most >= limits.num_draft_tokens)
        self._ranks = RankSampling.of(head, model_config, max_logprobs, most_drafts, bool(transforms))
        own = self._ranks.recipes if self._ranks else {}
        if own:
            self._sizes = self._sizes._replace(vocabulary=None, mask_words=None)
        self._last_tokens, self._hidden = last_tokens, hidden
        self._transforms, self._vocab_size = transforms, vocab_size
        of_prompts: Recipe = functools.partial(prompt_logprobs_function, model_config, max_logprobs)
        self._prompt_recipe = (self._ranks and self._ranks.prompt_recipe) or of_prompts
        self._prompt_depends = graph_fields.of_head(model_config, limits, dtype, max_logprobs, device)
        # What sizes these functions are for, where they are not for any.
        sizes = {} if self._sizes.vocabulary is not None else {"vocab_size": vocab_size}
        sizes |= {} if self._sizes.most_rows is not None else {"most_logits_rows": len(last_tokens)}
        of_counts = {} if self._sizes.most_requests is not None else {"max_num_seqs": limits.max_num_seqs}
        of_counts |= {"has_drafts": True} if most_drafts else {}
        of_counts |= {"most_drafts": most_drafts} if most_drafts > 15 else {}
        of_counts |= {"has_trees": True} if limits.has_draft_trees else {}
        of_logprobs = {"max_logprobs": max_logprobs}
        of_ranks = {"num_ranks": self._ranks.head.ranks.size} if self._ranks else {}
        self._depends = {
            kind: graph_fields.of_sampling(dtype, **others, **sizes, **(of_ranks if kind in own else {}))
            for kind, others in {"sample": {}, "sample_changed": of_counts, "logprobs": of_logprobs}.items()
        }
        self._recipes: dict[str, Recipe] = {
            "sample": _sampler,
            "sample_changed": functools.partial(processing_sampler_function, transforms, most_drafts),
            "logprobs": functools.partial(logprobs_function, max_logprobs),
            **own,
        }
        self._functions: dict[str, CompiledFunction] = {}
        # [max_num_seqs + 1, V or the rank's] float32; the last row is for padding. Few requests count tokens.
        width = self._width("sample_changed")
        self._token_counts = native.zeros_on(device, (limits.max_num_seqs + 1, width), torch.float32)
        mark_sizes(self._token_counts, self._sizes.most_requests, self._sizes.vocabulary)
        mark_static_address(self._token_counts)
        draft_rows = None if not most_drafts else TreeRows if limits.has_draft_trees else DraftRows
        self._logits_buffers = {
            rows: _LogitsBuffers(rows, self._sizes, vocab_size, transforms, device, draft_rows)
            for rows in sorted({bucket.num_rows for bucket in buckets_of(limits)})
        }
        empty = RequestRows(limits, vocab_size, transforms)
        for buffers in self._logits_buffers.values():
            buffers.fill([], SchedulerOutput(), empty)
        self._prompt_dtypes = torch.int64, torch.int64, *([torch.int32] if limits.max_loras else [])
        self._max_logprobs, self._most_tokens = max_logprobs, limits.token_bucket_sizes[-1]
        self._prompt_input = self._rows_of_prompts(most_prompt_rows(limits, vocab_size, device.type))

    @property
    def unwritten_bytes(self) -> int:
        """Those of ``nbytes`` that take a host's memory only as requests count tokens."""
        return self._token_counts.nbytes if self._device.type == "cpu" else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on the device."""
        inputs = sum(buffers.buffers.nbytes for buffers in self._logits_buffers.values())
        gathered = max((tensor.nbytes for tensor in self._gathered.values()), default=0)
        return self._token_counts.nbytes + inputs + gathered + sum(tensor.nbytes for tensor in self._prompt_input)

    @property
    def bytes_of_prompts(self) -> int:
        """Most bytes that the log-probabilities of a step's prompts take: those of a piece, and the results of all."""
        of_pieces = len(self._prompt_input[0]) * bytes_of_row(self._vocab_size, self._max_logprobs)
        return of_pieces + self._most_tokens * 12 * (self._max_logprobs + 1)

    # -- Compiling

    def jobs(
        self, sampling_inputs: dict[int, SamplingInput], logits: Callable[..., Tensor], weights: Any, weight: float
    ) -> list[Job]:
        """Everything to compile, for other processes.

        Args:
            logits: ``logits(rows, V)`` are like those of a step.
            weight: about how long each takes to compile beside the step.
        """
        threads = torch.get_num_threads()
        jobs: dict[str, Job] = {}
        for rows, sampling_input in sampling_inputs.items():
            for kind, recipe in self._recipes.items():
                if kind != "sample_changed" or not self._transforms:
                    marked = self._marked(logits(rows, self._width(kind)))
                    args = self._arguments(kind, rows, marked, sampling_input)
                    name = self._name(kind, rows)
                    sizes = jobs[name].sizes if name in jobs else ()
                    sizes += ({self._sizes.sampled.name: rows},) if self._sizes.sampled else ()
                    jobs[name] = Job(name, recipe, args, threads, weight, self._depends[kind], sizes)
        arguments = self._prompt_arguments(weights)
        prompts = Job("prompt_logprobs", self._prompt_recipe, arguments, threads, weight, self._prompt_depends)
        return [*jobs.values(), prompts]

    def uncached(self) -> list[str]:
        """Names of the functions that are compiled at each start, since they contain a user's own code."""
        return list({self._name("sample_changed", rows): 0 for rows in self._logits_buffers if self._transforms})

    def _name(self, kind: str, rows: int) -> str:
        return f"{kind}_{rows}" if self._uses_trees else kind

    def warm_up(
        self, bucket: Bucket, sampling_input: SamplingInput, make_logits: Callable[[], Tensor], make: Make
    ) -> None:
        """Compile what runs after a bucket's step. What is there already is recorded after this step too, on a GPU."""
        rows = bucket.num_rows
        for kind, between in self._paths:
            name = self._name(kind, rows)
            arguments = self._arguments_after(bucket, sampling_input, make_logits, kind, between)
            if name in self._functions:
                self._functions[name].record_again(arguments)
                continue
            keep = kind != "sample_changed" or not self._transforms
            function = make(self._recipes[kind](), name, self._depends[kind], keep=keep)
            function.warm_up(arguments)
            self._functions[name] = function

    def warm_up_prompts(self, weights: Any, make: Make) -> None:
        """Compile what gives the log-probabilities of prompts, which runs after any step."""
        function = make(self._prompt_recipe(), "prompt_logprobs", self._prompt_depends)
        # Two rows serve where any number does: 64 take 100 MiB with 262,144 tokens, the most that this start would.
        few = self._rows_of_prompts(2) if self._sizes.prompt_rows is not None else self._prompt_input
        function.warm_up(lambda: (weights, few, self._hidden))
        self._functions["prompt_logprobs"] = function

    def record_again(self, bucket: Bucket, sampling_input: SamplingInput, make_logits: Callable[[], Tensor]) -> None:
        """On a GPU: record every CUDA graph after the bucket's step again."""
        for kind, between in self._paths:
            arguments = self._arguments_after(bucket, sampling_input, make_logits, kind, between)
            self._functions[self._name(kind, bucket.num_rows)].record_again(arguments)

    def record_prompts_again(self, weights: Any) -> None:
        """On a GPU: record the CUDA graph of the log-probabilities of prompts again."""
        self._functions["prompt_logprobs"].record_again(lambda: self._prompt_arguments(weights))

    def functions(self) -> dict[str, CompiledFunction]:
        """All of them, by their names."""
        return dict(self._functions)

    def _marked(self, logits: Tensor) -> Tensor:
        """``logits`` of a step, ``[rows, V]``, with their sizes to the compiler."""
        return mark_sizes(logits, self._sizes.sampled, self._sizes.vocabulary)

    def _takes_own(self, kind: str) -> bool:
        """Whether the function takes the logits of a rank's own tokens."""
        return self._ranks is not None and kind in self._ranks.recipes

    def _width(self, kind: str) -> int:
        """How many tokens' logits it takes."""
        return self._ranks.width if self._ranks is not None and self._takes_own(kind) else self._vocab_size

    def _arguments(self, kind: str, rows: int, logits: Tensor, sampling_input: SamplingInput) -> tuple:
        """The function's, with the logits that it takes."""
        logits_input = self._logits_buffers[rows].first(len(logits)) if kind == "sample_changed" else None
        changed = (logits_input, self._token_counts) if logits_input is not None else ()
        own = (self._ranks.tokens,) if self._ranks is not None and self._takes_own(kind) else ()
        return logits, sampling_input, *changed, *own, self._last_tokens

    def _logits_for(self, given: Tensor) -> Callable[[str], Tensor]:
        """kind -> the logits that it takes, of those that a step gives. They are gathered at most once."""
        ranks = self._ranks
        if ranks is None:
            return lambda kind: given
        gathered = functools.cache(lambda: self._in_place(ranks.head.gathered(given)))
        return lambda kind: given if self._takes_own(kind) else gathered()

    def _in_place(self, gathered: Tensor) -> Tensor:
        """Logits that were gathered, where the graphs behind them read them."""
        if not self._records:
            return gathered
        rows, most = len(gathered), len(self._last_tokens)
        if not self._gathered:
            self._gathered[most] = gathered.new_empty(most, gathered.shape[1])
        if rows not in self._gathered:
            self._gathered[rows] = self._gathered[most][:rows]
        self._gathered[rows].copy_(gathered)
        return self._gathered[rows]

    def _arguments_after(
        self,
        bucket: Bucket,
        sampling_input: SamplingInput,
        make_logits: Callable[[], Tensor],
        kind: str,
        between: str | None,
    ) -> Callable[[], tuple]:
        """What makes the arguments of ``kind``, each time by a step and what runs ``between`` the two."""
        rows = bucket.num_rows

        def arguments() -> tuple:
            logits_for = self._logits_for(make_logits())
            if between is not None:
                logits = self._marked(logits_for(between))
                self._functions[self._name(between, rows)](*self._arguments(between, rows, logits, sampling_input))
            return self._arguments(kind, rows, self._marked(logits_for(kind)), sampling_input)

        return arguments

    def _rows_of_prompts(self, rows: int) -> tuple[Tensor, ...]:
        """Rows of ``hidden``, the tokens that follow them, and the slots of their adapters where there are any."""
        made = tuple(torch.zeros(rows, dtype=kind, device=self._device) for kind in self._prompt_dtypes)
        for tensor in made:
            mark_static_address(mark_sizes(tensor, self._sizes.prompt_rows))
        return made

    def _prompt_arguments(self, weights: Any) -> tuple:
        return weights, self._prompt_input, self._hidden

    # -- Running

    def admit(self, admissions: Sequence[StartedRequest], store: RequestRows) -> None:
        """Count the tokens of requests that start or resume, where their penalties need that."""
        for admission in admissions:
            row, params = store.row_of(admission.request_id), admission.sampling_params
            if params.counts_tokens:
                ids = torch.tensor((*admission.prompt_token_ids, *admission.output_token_ids), dtype=torch.int64)
                prompt, output = on_device(ids, self._device).tensor_split([len(admission.prompt_token_ids)])
                if self._ranks is not None and self._takes_own("sample_changed"):
                    prompt, output = self._ranks.counts(prompt), self._ranks.counts(output)
                counts = self._token_counts[row].zero_().index_fill_(0, prompt, 0.5)
                counts.index_add_(0, output, torch.ones(len(output), device=self._device))

    def fill(
        self, rows: Sequence[int] | np.ndarray, output: SchedulerOutput, store: RequestRows, num_rows: int
    ) -> None:
        """Write the parameters that change the logits of a step's rows, for a bucket of ``num_rows``."""
        self._logits_buffers[num_rows].fill(rows, output, store)

    def run(
        self, bucket: Bucket, sampling_input: SamplingInput, logits: Tensor, needs: SamplingNeeds
    ) -> LogprobRows | None:
        """After the bucket's step: leave the tokens in ``last_tokens``; returns log-probabilities where needed."""
        logits_for = self._logits_for(logits)

        def run(kind: str) -> LogprobRows | None:
            arguments = self._arguments(kind, bucket.num_rows, logits_for(kind), sampling_input)
            function = self._functions[self._name(kind, bucket.num_rows)]
            result = function(*arguments)
            function.forget()  # each step has other logits: those of all numbers of rows would be kept for nothing
            return result

        if needs.changed_logits or needs.sampling:
            run("sample_changed" if needs.changed_logits else "sample")
        return run("logprobs") if needs.logprobs else None

    def prompt_logprobs(self, weights: Any, output: SchedulerOutput, store: RequestRows) -> LogprobRows:
        """Of ``output.prompt_targets``, one after the other, on the host; on a GPU complete when its stream is there.

        Runs after the step that computed them. What that step returned is not used any more.
        """
        starts = np.concatenate([[0], np.cumsum(output.num_scheduled_tokens)])
        places = [int(starts[i]) + place + j for i, place, ids in output.prompt_targets for j in range(len(ids))]
        token_ids = [token_id for _, _, ids in output.prompt_targets for token_id in ids]
        columns = [places, token_ids]
        if len(self._prompt_input) > 2:
            owners = [store.row_of(output.request_ids[i]) for i, _, ids in output.prompt_targets for _ in ids]
            columns.append(store.adapter_slots[owners].tolist())
        size = len(self._prompt_input[0])
        padding = [0] * (-len(places) % size)
        wanted = on_device(torch.tensor([column + padding for column in columns], dtype=torch.int64), self._device)
        found: LogprobRows | None = None
        for start in range(0, len(places), size):
            if self._uses_trees:
                begin_step_of_trees()  # else the graph would be recorded anew, as one that follows the last
            for target, source in zip(self._prompt_input, wanted, strict=True):
                target.copy_(source[start : start + size])
            part = self._functions["prompt_logprobs"](*self._prompt_arguments(weights))
            if found is None:
                found = LogprobRows(*(self._on_host(len(places), tensor) for tensor in part))
            for rows, tensor in zip(found, part, strict=True):
                rows[start : start + size].copy_(tensor[: len(places) - start], non_blocking=True)
        assert found is not None, "no log-probabilities of prompts are asked for"
        return found

    def _on_host(self, rows: int, like: Tensor) -> Tensor:
        """``[rows, ...]`` in host memory that a GPU's copies reach while the host goes on."""
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, pin_memory=self._device.type == "cuda")


def most_prompt_rows(limits: EngineLimits, vocab_size: int, device_type: str = "cpu") -> int:
    """Of how many tokens of prompts the log-probabilities are computed at a time."""
    rows = min(_MOST_PROMPT_ROWS, limits.token_bucket_sizes[-1])
    return rows if device_type == "cuda" else min(rows, max(1, _MOST_PROMPT_LOGITS // vocab_size))


def _sampler() -> Callable:
    return sampler_function


class _LogitsBuffers:
    """A ``LogitsInput`` for one number of rows, as the host fills it and the graph reads it.

    ``sizes``: to the compiler. ``draft_rows``: what the graph is told of drafts; None: there are none.
    """

    def __init__(
        self,
        rows: int,
        sizes: StepSizes,
        vocab_size: int,
        transforms: tuple[LogitsTransform, ...],
        device: torch.device,
        draft_rows: type[DraftRows] | type[TreeRows] | None = None,
    ) -> None:
        self._parameters, self._draft_rows = logits_parameters(transforms), draft_rows
        fields: Fields = {
            "row": ((rows,), torch.int64),
            "is_due": ((rows,), torch.float32),
            "allowed": ((rows, num_mask_words(vocab_size)), torch.int32),
        }
        if draft_rows is not None:
            fields |= dict.fromkeys(draft_rows._fields, ((rows,), torch.int64))
        for parameter in self._parameters:
            fields[parameter.name] = (rows, *parameter.shape), parameter.dtype
        self.buffers = FieldBuffers(fields, device)
        views = {name: mark_sizes(tensor, sizes.sampled) for name, tensor in self.buffers.tensors.items()}
        mark_sizes(views["allowed"], None, sizes.mask_words)
        self._transforms = transforms
        self._inputs = SizedInputs(views, self._input_of, (rows,))

    def _input_of(self, views: Mapping[Any, Tensor]) -> LogitsInput:
        custom = tuple(tuple(views[t.name, name] for name in t.fields) for t in self._transforms)
        own = {name: views[name] for name in LogitsInput._fields if name not in ("fields", "drafts")}
        drafts = None if self._draft_rows is None else self._draft_rows(*(views[n] for n in self._draft_rows._fields))
        return LogitsInput(**own, fields=custom, drafts=drafts)

    def first(self, rows: int) -> LogitsInput:
        """The input of so many rows; on a CPU they may be fewer than there are."""
        return self._inputs.first(rows)

    def fill(self, rows: Sequence[int] | np.ndarray, output: SchedulerOutput, store: RequestRows) -> None:
        samples: Sequence[int] = output.num_samples
        first_rows: Sequence[int] = range(len(rows))
        if max(samples, default=0) > 1:
            places = logits_rows(output)[0].tolist()
            rows, samples = [rows[place] for place in places], [min(samples[place], 1) for place in places]
            first_rows = output.first_rows()
        arrays, n = self.buffers.next_arrays(), len(rows)
        padded = [*rows, *[store.padding_row] * (len(arrays["row"]) - n)]
        arrays["row"][:] = padded
        arrays["is_due"][:n], arrays["is_due"][n:] = samples, 0
        for parameter in self._parameters:
            arrays[parameter.name][:] = store.parameters[parameter.name][padded]
        if self._draft_rows is DraftRows:
            following = np.full(len(arrays["first"]), -1)
            _fill_following(following, output, first_rows)
            arrays["following"][:] = following
            arrays["first"][:] = np.arange(len(arrays["first"]))
            arrays["first"][:n] = np.repeat(first_rows, np.maximum(output.num_samples, 1)) if n else []
        elif self._draft_rows is TreeRows:
            _fill_tree_rows(arrays["parent"], arrays["draft"], output, first_rows)
        arrays["allowed"][:] = -1
        for index, place, words in output.masks:
            arrays["allowed"][first_rows[index] + place] = words
        self.buffers.copy()


def _fill_following(following: np.ndarray, output: SchedulerOutput, first_rows: Sequence[int]) -> None:
    """Write to each row which draft the step computes after the row's token; ``following`` has a -1 for each."""
    ends = np.cumsum(output.num_scheduled_tokens).tolist()
    for first, end, count in zip(first_rows, ends, output.num_samples, strict=True):
        if count > 1:
            following[first : first + count - 1] = output.token_ids[end - count + 1 : end]


def _fill_tree_rows(parent: np.ndarray, draft: np.ndarray, output: SchedulerOutput, first_rows: Sequence[int]) -> None:
    """As ``TreeRows`` has them: of each row the draft that is its token, and the row that has to choose that."""
    parent[:], draft[:] = np.arange(len(parent)), -1
    trees, ends = dict(output.trees), np.cumsum(output.num_scheduled_tokens).tolist()
    for place, (first, end, count) in enumerate(zip(first_rows, ends, output.num_samples, strict=True)):
        if count > 1:
            draft[first + 1 : first + count] = output.token_ids[end - count + 1 : end]
            parent[first + 1 : first + count] = first + np.array(trees.get(place, range(count - 1)))
