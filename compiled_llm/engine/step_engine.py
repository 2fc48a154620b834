"""StepEngine: requests are queued, served a step at a time, streamed and aborted. CompiledEngine is made of it."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from compiled_llm.api.argument_checks import UnservableError, integer
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.speculative_config import NETWORK_METHODS
from compiled_llm.checkpoint.draft_model import draft_checkpoint
from compiled_llm.checkpoint.generation_config import (
    default_sampling_params,
    listed,
    suggested_sampling,
    warn_of_unserved,
)
from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer, model_config, with_end_of_text
from compiled_llm.drafting.methods import host_source, network_source
from compiled_llm.engine.admission import Admission, PreparedRequest
from compiled_llm.engine.completions import unserved_output
from compiled_llm.engine.core import EngineCore
from compiled_llm.engine.hand_over import hand_over
from compiled_llm.engine.interrupts import Interrupts
from compiled_llm.engine.own_process import OwnProcess
from compiled_llm.engine.request_stream import RequestStream, StreamReference
from compiled_llm.engine.transfers import Transfers
from compiled_llm.models.registry import with_stream
from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.parallel.rank_processes import RankProcesses
from compiled_llm.parallel.stages import StageProcesses
from compiled_llm.scheduling.drafter import CheckedDrafter, Drafter, DraftSource, draft_length
from compiled_llm.scheduling.request import BlockSource, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.system.progress import StartProgress
from compiled_llm.text.chat import ChatEncoder
from compiled_llm.text.prompts import Prompt
from compiled_llm.tiers.exchange import BlockExchange
from compiled_llm.worker.runner import ModelRunner
from compiled_llm.worker.worker_process import WorkerProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MOVING_SECONDS = 60.0  # that the end of an engine waits for blocks on their way to the disk


class StepEngine:
    """An engine without the methods that serve lists of prompts, and without reports; see ``CompiledEngine``."""

    def __init__(self, model: str | None = None, *, drafter: Drafter | None = None, **engine_args: Any) -> None:
        self._start(EngineConfig(model=model, **engine_args), drafter)

    @classmethod
    def from_config(cls, config: EngineConfig, *, drafter: Drafter | None = None) -> Self:
        engine = cls.__new__(cls)
        engine._start(config, drafter)
        return engine

    @own_settings()
    def _start(self, config: EngineConfig, drafter: Drafter | None) -> None:
        self.config = config
        num_draft_tokens = _num_draft_tokens(config, drafter)
        started, progress = time.perf_counter(), StartProgress(config.progress)
        directory = checkpoint_directory(config)
        self.model_config = with_stream(model_config(directory, config.model_impl, config.dtype), config.stream)
        if num_draft_tokens and config.attention_sink_tokens:
            raise ValueError(
                f"attention_sink_tokens must be 0 with drafts (tokens leave the cache before it is known whether "
                f"drafts are right), given {config.attention_sink_tokens}"
            )
        self.tokenizer = load_tokenizer(config, directory)
        if self.tokenizer is None:
            progress.line(f"{directory} has no tokenizer: it serves prompt_token_ids only, and outputs have no text")
        else:
            self.model_config, note = with_end_of_text(self.model_config, self.tokenizer)
            for line in (*self.tokenizer.notes, *note):
                progress.line(line)
        network = draft_checkpoint(config, self.model_config, self.tokenizer)
        self.runner: ModelRunner | WorkerProcess | RankProcesses
        of_all = config, self.model_config, directory
        if config.pipeline_parallel_size > 1:
            self.runner = StageProcesses(*of_all, progress, num_draft_tokens)
        elif config.tensor_parallel_size > 1:
            self.runner = RankProcesses(*of_all, progress, num_draft_tokens, network)
        elif config.model_process:
            self.runner = WorkerProcess(*of_all, num_draft_tokens, network)
        else:
            self.runner = ModelRunner(*of_all, progress, num_draft_tokens, network)
        self._draft_source = self._source(drafter)
        files = None if isinstance(self.runner, WorkerProcess) else self.runner.files
        exchange = None if files is None else files.folder
        self._transfers = Transfers(config, exchange) if isinstance(exchange, BlockExchange) else None
        self._core = EngineCore(
            config, self.model_config, self.tokenizer, self.runner, self._draft_source, self._transfers
        )
        self._closed = False
        self._own_process = OwnProcess()
        self._interrupts = Interrupts()
        self._admission = Admission(
            config,
            self.model_config,
            self.tokenizer,
            self.runner.transforms,
            self.runner.limits,
            self.scheduler.request_capacity,
            self.runner.adapters,
        )
        self._chat_encoder = ChatEncoder(self.tokenizer)
        self._suggested_sampling = suggested_sampling(directory)
        warn_of_unserved(directory, self.runner.limits.max_model_len)
        self._has_shown_sampling = False
        self._ids = itertools.count()
        self._streams: dict[str, deque[RequestOutput]] = {}  # where the outputs of each stream go
        self._stream_references: dict[str, StreamReference] = {}
        self._dropped: deque[StreamReference] = deque()  # streams that were garbage collected
        self._undelivered: list[RequestOutput] = []  # outputs for step(), of steps that stream() ran
        progress.line(f"ready in {time.perf_counter() - started:.1f} s: {self.runner.describe_start()}")

    def _source(self, drafter: Drafter | None) -> DraftSource | None:
        """What drafts tokens, if anything does."""
        wanted = self.config.speculation
        if wanted is not None and wanted.method in NETWORK_METHODS:
            return network_source(wanted)
        if wanted is not None:
            return host_source(wanted, self.model_config.vocab_size)
        return None if drafter is None else CheckedDrafter(drafter, self.model_config.vocab_size)

    @property
    def own_runner(self) -> ModelRunner:
        """The model runner, for what reads its tensors or code. Raises ``ValueError`` if another process has it."""
        if not isinstance(self.runner, ModelRunner):
            raise ValueError(
                "model_process must be False and tensor_parallel_size 1 here, and so pipeline_parallel_size, given "
                f"{self.config.model_process}, {self.config.tensor_parallel_size} and "
                f"{self.config.pipeline_parallel_size}: this reads what the runner holds"
            )
        return self.runner

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler at work. A fault in it is survived with a new one."""
        return self._core.scheduler

    def __repr__(self) -> str:
        """One line. An engine that failed to start has it too, for whoever debugs that."""
        model = self.config.model or "the bundled model" if hasattr(self, "config") else "without a model"
        if not hasattr(self, "_ids"):
            return f"<{type(self).__name__} {model}: not started>"
        runner = self.runner
        sizes = ", ".join(map(str, runner.limits.decode_bucket_sizes))
        kv_cache = f"{self.scheduler.pool.num_blocks:,} KV blocks of {runner.limits.block_size} tokens"
        where = f"{str(runner.dtype).removeprefix('torch.')} on {runner.device}"
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} {model}: {where}, buckets {sizes}, {kv_cache}, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and free the weights and the KV cache. The engine serves nothing afterwards.

        In a fork of the process that made it, nothing happens to that one's engine.
        """
        with self._interrupts:
            was_closed, self._closed = self._closed, True
            if was_closed or not self._own_process.is_this_one:
                return
            try:
                self.abort(list(self._core.entries))
                self._core.drain()
                end = time.monotonic() + _MOVING_SECONDS
                while self._core.move_blocks() and time.monotonic() < end:
                    pass
            finally:
                self._chat_encoder.close()
                self._admission.close()
                self.runner.close()

    # -- Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        *,
        lora_request: LoRARequest | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Queue a request; ``step`` advances it.

        Args:
            prompt: as that of ``stream``, or what ``prepare`` made of it, the parameters and the adapter.
            lora_request: an adapter; None: the model as it is.
            kv_transfer_params: vLLM's: ``do_remote_decode`` gives its KV blocks to whoever has what the last output has
                as ``kv_transfer_params``; with that they are taken from there, also while they are computed, by the
                ``remote_request_id`` that both requests are given. For engines with a ``role``.
            output_token_ids: of an output that another engine has begun, with the same seed: it goes on after them, and
                the first output has them too. Not with ``n`` above 1. Their log-probabilities are left empty.

        Raises:
            ValueError: the id is in use, the prompt or its parameters cannot be served, or as many requests as may be
                are unfinished; nothing is queued then.
            ImportError: a package is missing that the parameters need.
            RuntimeError: the engine is closed, or this process is a fork of the one that made it.
        """
        source = self._source_of(kv_transfer_params)
        lease = None
        if self._transfers is not None and kv_transfer_params and kv_transfer_params.get("do_remote_decode"):
            lease = self._transfers.lease(kv_transfer_params)
        try:
            self._add(
                request_id,
                prompt,
                sampling_params,
                priority,
                lora_request=lora_request,
                transfer=(source, lease),
                output_token_ids=output_token_ids,
            )
        except BaseException:
            if source is not None and self._transfers is not None:
                self._transfers.exchange.end(source)
            raise

    def check_transfer(self, params: Mapping[str, Any] | None) -> None:
        """Raise what ``add_request`` raises for these ``kv_transfer_params``, and connect to the engine that they name.

        Any thread may call it; it may wait.
        """
        self._source_of(params)

    def hand_over(self, seconds: float) -> dict[str, tuple[list[int], dict[str, Any] | None]]:
        """End all requests, streams left out, that have not ended, and lay their KV blocks ready for other engines.

        Args:
            seconds: that the blocks may take; those that are late are computed again.

        Returns:
            Of each request its output tokens (of its first continuation) and the ``kv_transfer_params`` with which
            another engine goes on; None for one of which no block is ready.
        """
        with self._interrupts:
            names = [name for name in self._core.entries if name not in self._streams]
            return hand_over(self._core, self._transfers, names, seconds)

    def _source_of(self, params: Mapping[str, Any] | None) -> BlockSource | None:
        if params is not None and self._transfers is None:
            raise ValueError("kv_transfer_params must be None unless the engine has a role or a kv_transfer_address")
        return None if self._transfers is None else self._transfers.check(params)

    def check_request(self, request_id: str, priority: int, preparing: Collection[str] = ()) -> None:
        """Raise what ``add_request`` raises whatever the prompt is. ``preparing``: ids that will be added before it."""
        self._check_open()
        longest = self.config.max_request_id_length
        is_name = isinstance(request_id, str) and 0 < len(request_id) <= longest
        if not is_name or request_id in self._core.entries or request_id in preparing:
            raise ValueError(
                f"request_id must be a non-empty str of at most {longest} characters (the engine's "
                f"max_request_id_length), that no unfinished request has, given {shown(request_id)}"
            )
        self._check_room(1, len(preparing))
        self._check_priority(priority)

    def _check_priority(self, priority: int) -> None:
        integer("priority", priority, -(2**31), 2**31 - 1)
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise ValueError(
                f"priority must be 0 unless the engine's scheduling_policy is 'priority', given {shown(priority)}"
            )

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """Encode a prompt, compile the grammar of its parameters and read its adapter; for a call of ``add_request``.

        This may take long. Any thread may call it, also while another one steps.

        Raises:
            ValueError: the prompt, its parameters or its adapter cannot be served.
            ImportError: a package is missing that the parameters need.
            RuntimeError: this process is a fork of the engine's.
        """
        self._own_process.check()
        return self._admission.prepare(prompt, sampling_params, lora_request)

    def begin_reading(self, lora_request: LoRARequest | None) -> "Future[LoRARequest | None]":
        """Read an adapter in another thread; what comes of it is for ``prepare``, which then looks at no file.

        Done at once for None, and for an adapter in host memory whose files were looked at within the last second.
        """
        self._own_process.check()
        return self._admission.begin_reading(lora_request)

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of requests that run, and of those that wait."""
        names: tuple[set[str], set[str]] = set(), set()
        for entry in self._core.entries.values():
            if entry.adapter is not None and not entry.is_finished:
                names[all(one.status is not Status.RUNNING for one in entry.requests)].add(entry.adapter.lora_name)
        return sorted(names[0]), sorted(names[1])

    def drop_adapter(self, lora_request: LoRARequest) -> None:
        """Forget an adapter, but for the requests that have it."""
        self._admission.host_adapters.drop(lora_request.lora_path)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to return."""
        self._abort_dropped_streams()
        return self._core.has_unfinished_requests() or bool(self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs of the requests that got a token, those of ``stream`` left out.

        After an interrupt in a step, the next call returns that step's outputs with its own.

        Raises:
            RuntimeError: this process is a fork of the engine's.
        """
        with self._interrupts:
            self._undelivered += self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def join_deltas(self, seconds: float, of_a_request: float, most: float) -> None:
        """Give the deltas of several steps at once, where steps are short, and so spare whoever takes them.

        Args:
            seconds, of_a_request: so many, and so many for each running request, go by from one output of a request to
                the next, and not more than ``most``. The first and the last one of a request do not wait, nor do those
                of several continuations.
        """
        self._core.delta_seconds = seconds, of_a_request, most

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests now and free their blocks. Unknown and finished ids are passed over.

        A stream gets a last output, with ``finish_reason="abort"``.
        """
        self.abort_all([request_id] if isinstance(request_id, str) else request_id)

    def abort_all(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """As ``abort``; returns the last outputs of requests that are no streams."""
        outputs: list[RequestOutput] = []
        with self._interrupts:
            for request_id in request_ids:
                entry = self._core.entries.get(request_id)
                if entry is not None:
                    self._core.abort(entry)
                    self._streams.get(request_id, outputs).append(entry.output())
                    if self._transfers is not None:
                        self._transfers.end(request_id, is_served=False)
        return outputs

    def abort_waiting(self) -> list[str]:
        """End the requests that have not begun to run, streams left out; returns their ids."""
        entries = self._core.entries.items()
        waiting = [
            request_id
            for request_id, entry in entries
            if request_id not in self._streams
            and all(request.first_scheduled_time is None for request in entry.requests)
        ]
        self.abort(waiting)
        return waiting

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV blocks, in host memory too. Files of blocks stay.

        Raises:
            RuntimeError: requests are unfinished: their blocks are in use.
        """
        if self.scheduler.has_unfinished_requests():
            raise RuntimeError("reset_prefix_cache() while requests are unfinished: finish or abort them first")
        self.scheduler.pool.clear_cache()
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.forget_host()

    def move_blocks(self) -> bool:
        """While nothing is unfinished: let KV blocks get on to the disk. Returns whether some are on their way then.

        It takes 20 ms or little more; without ``kv_disk_path`` nothing. ``close`` does the same for a minute at most.
        """
        return not self.has_unfinished_requests() and self._core.move_blocks()

    def ask_for_memory(self) -> bool:
        """While nothing is unfinished, on a CPU: have the system give memory for KV blocks that were never used.

        It takes some 5 ms; what the next requests write is there then. Graphs that are compiled take over before, and
        once all have, what that freed is given back, in up to 0.1 s. Returns whether more is to be asked for.
        """
        return not self.has_unfinished_requests() and self._core.ask_for_memory()

    @property
    def is_changing(self) -> bool:
        """Whether graphs that are compiled beside have still to take over, which ``ask_for_memory`` lets them."""
        return self._core.is_changing

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """Complete one prompt, with an adapter or none; an iterator over its output after each of its tokens.

        Each output holds all so far, unless ``output_kind`` of the parameters is "delta" or "final".
        Several streams may be consumed in turns. A stream that is closed early, or dropped, aborts its request.
        """

        def advance() -> None:
            with self._interrupts:
                self._undelivered += self._advance()

        with self._interrupts:
            request_id = self._unused_id("stream")
            self.add_request(request_id, prompt, sampling_params, lora_request=lora_request)
            stream = RequestStream(advance, lambda: self._end_stream(request_id))
            self._streams[request_id] = stream.outputs
            self._stream_references[request_id] = StreamReference(stream, request_id, self._dropped)
        return stream

    # -- What the model brings

    def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """The model's tokenizer as one of transformers: a new one, which may be changed without changing the engine.

        It gives a text the tokens that the engine gives it, but for a second begin-of-text token, which the engine
        leaves out. Its ``apply_chat_template`` runs the template without the bounds of ``chat``.

        Raises:
            ValueError: the model has none.
        """
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give the tokenizer argument")
        return self.tokenizer.for_users()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's ``generation_config.json`` suggests; the usual defaults for all that it leaves out.

        ``chat`` follows them unless it is given others. ``generate`` and the others follow ``SamplingParams()`` alone.

        Raises:
            ValueError: the file suggests what ``SamplingParams`` does not allow.
        """
        return default_sampling_params(self._suggested_sampling)

    def chat_sampling_params(self) -> SamplingParams:
        """``get_default_sampling_params``, for a chat that is given none; the first time they are shown on stderr."""
        params = self.get_default_sampling_params()
        if self._suggested_sampling and not self._has_shown_sampling:
            self._has_shown_sampling = True
            suggested = listed(self._suggested_sampling)
            StartProgress(self.config.progress).line(f"chat() samples as generation_config.json suggests: {suggested}")
        return params

    # -- Inside

    def _check_open(self) -> None:
        """``RuntimeError`` for an engine that is closed, or of another process."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._own_process.check()

    def _add(
        self,
        request_id: str,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams | None,
        priority: int,
        output_kind: str | None = None,
        lora_request: LoRARequest | None = None,
        transfer: tuple[BlockSource | None, bytes | None] = (None, None),
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """``add_request``, with ``output_kind`` in the place of that of the parameters if it is given."""
        self.check_request(request_id, priority)
        prepared = self._admission.prepare(prompt, sampling_params, lora_request)
        order = self._core.counts.num_requests
        entry = self._admission.admit(request_id, prepared, priority, order, output_token_ids, transfer[0])
        entry.output_kind = output_kind or prepared.params.output_kind
        with self._interrupts:
            if self._transfers is not None:
                digests = self.scheduler.prefix_cache.digests_below(entry.requests[0], 0)
                self._transfers.begin(entry, digests, transfer[1])
            self._core.add(entry)

    def _for_each(
        self, prompts: Iterable[tuple[str, Any]], function: Callable[[str, Any], None], raise_on_error: bool
    ) -> dict[str, RequestOutput]:
        """Call ``function`` with each (request id, prompt). Returns the outputs of prompts that it refuses, by id."""
        refused = {}
        for request_id, prompt in prompts:
            self._interrupts.take()
            try:
                if isinstance(prompt, ValueError):
                    raise prompt
                function(request_id, prompt)
            except ValueError as error:
                if raise_on_error or isinstance(error, UnservableError):
                    raise
                refused[request_id] = unserved_output(request_id, prompt, "error", str(error))
        return refused

    def _check_room(self, count: int, num_preparing: int = 0) -> None:
        """``ValueError`` if ``count`` more requests were too many."""
        unfinished, most = len(self._core.entries) + num_preparing, self.config.max_queued_requests
        if unfinished + count > most:
            raise ValueError(
                f"at most {most} requests may be unfinished at once (the engine's max_queued_requests), given {count} "
                f"beside {unfinished}: wait for some to finish, or raise the limit"
            )

    def _advance(self) -> list[RequestOutput]:
        """Run one step; outputs of streams go to them, the others are returned."""
        self._own_process.check()
        self._abort_dropped_streams()
        self._core.log.enter(device_is_busy=bool(self._core.launched))
        core = self._core
        core.advance()
        started = time.perf_counter()
        outputs = []
        for request_id in list(core.updated):
            entry, transfers = core.entries.get(request_id), self._transfers
            if transfers and entry and not transfers.may_end(entry, core.scheduler, core.move_blocks):
                continue
            output = self._next_output(request_id)
            del core.updated[request_id]
            if output is not None and request_id in self._streams:
                self._streams[request_id].append(output)
            elif output is not None:
                outputs.append(output)
        core.log.leave()
        core.counts.output_seconds += time.perf_counter() - started
        return outputs

    def _next_output(self, request_id: str) -> RequestOutput | None:
        """What the user sees of a request that advanced."""
        entry = self._core.entries.get(request_id)
        if entry is None:
            return None
        output = entry.output() if entry.output_kind != "final" or entry.is_finished else None
        if output is not None and output.finished:
            self._core.forget(entry)
            if self._transfers is not None:
                is_served = all(request.finish_reason not in ("abort", "error") for request in entry.requests)
                params = self._transfers.end(request_id, is_served=is_served)
                output = dataclasses.replace(output, kv_transfer_params=params)
        return output

    def _abort_dropped_streams(self) -> None:
        """Streams that the garbage collector found: it may run anywhere, so they wait for a safe moment."""
        if self._dropped:
            with self._interrupts:
                while self._dropped:
                    self._end_stream(self._dropped.popleft().request_id)

    def _end_stream(self, request_id: str) -> None:
        with self._interrupts:
            self._streams.pop(request_id, None)
            self._stream_references.pop(request_id, None)
            self.abort(request_id)

    def _unused_id(self, kind: str) -> str:
        return next(name for n in self._ids if (name := f"{kind}-{n}") not in self._core.entries)


def _num_draft_tokens(config: EngineConfig, drafter: Drafter | None) -> int:
    """Most tokens that are drafted for a request and step. ``ValueError`` where two things would draft."""
    if config.speculation is None:
        return draft_length(drafter)
    if drafter is not None:
        raise ValueError(
            f"drafter must be None with speculative_config, whose method drafts, given {type(drafter).__name__}"
        )
    return config.speculation.num_tokens
