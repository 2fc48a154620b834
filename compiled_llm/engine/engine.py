"""CompiledEngine: prompts in, outputs out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRARequest, check_lora_request, pair_lora_requests
from compiled_llm.api.outputs import EngineStats, RequestOutput, ScoreOutput
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL as DEMO_MODEL
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.compiling.report import CompileReport
from compiled_llm.drafting.methods import text_bytes
from compiled_llm.engine.beam_search import BeamGroup, check_beam_search
from compiled_llm.engine.check import CheckReport, check
from compiled_llm.engine.failures import warn_if_all_failed
from compiled_llm.engine.scoring import score_output, scoring_params
from compiled_llm.engine.step_engine import StepEngine
from compiled_llm.models.registry import code_of, family_of
from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.report import machine_limits
from compiled_llm.report.limit_seconds import LimitSeconds
from compiled_llm.report.report import RunReport, make_report, make_trace
from compiled_llm.report.roofline import ModelWork
from compiled_llm.scheduling.drafter import Drafter
from compiled_llm.step.kv_cache import bytes_per_layer, bytes_per_slot
from compiled_llm.text.chat import messages_list
from compiled_llm.text.prompts import (
    EncodedPrompt,
    Prompt,
    pair_priorities,
    pair_sampling_params,
    prompt_list,
    scored_prompts,
)
from compiled_llm.worker.memory import MemoryLedger
from compiled_llm.worker.profiler import StepProfiler
from compiled_llm.worker.runner import ModelRunner


class CompiledEngine(StepEngine):
    """An engine for one model: load, compile every bucket, then serve.

    ``CompiledEngine(model, **engine_args)``; the arguments are those of ``EngineConfig``, and ``drafter``, an object
    that guesses tokens (``scheduling/drafter.py``). Compilation happens here, so that no request waits for it; from
    then on a recompile is an error.

    An interrupt (Ctrl-C, or another signal whose handler raises) is taken between two steps. What it ends is what was
    called: ``generate`` and ``beam_search`` abort their requests, ``step`` and ``stream`` keep theirs.

    An engine serves in the process that made it. In a fork of that one, whatever would run steps raises a
    ``RuntimeError``: start the process by "spawn", and make an engine there.

    Raises:
        ValueError: an argument, the model directory or the memory does not allow it; the message says what would.
    """

    def _start(self, config: EngineConfig, drafter: Drafter | None) -> None:
        super()._start(config, drafter)
        runner = self.runner
        cache_bytes = bytes_per_layer(self.model_config, runner.cache_dtypes)
        state_bytes = bytes_per_slot(self.model_config, runner.dtype)
        self._work = ModelWork.of(self.model_config, _weights_of(self), cache_bytes, state_bytes)
        limits = machine_limits.cached(runner.device, runner.dtype)
        self._limit_seconds = None if limits is None else LimitSeconds(self._work, limits)
        self.reset_report()

    # -- Serving lists of prompts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; returns the outputs in the order of the prompts.

        Args:
            prompts: a str, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``, or a list of
                these. Special tokens that a str spells, as a rendered chat does, become such, unless
                ``split_special_tokens`` of the parameters or the engine says otherwise.
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar.
            lora_request: the adapter of all prompts, or a list with that of each, None for the model as it is; for
                ``enable_lora=True``.
            priority: one for each prompt, lower is served first; for ``scheduling_policy="priority"``.
            raise_on_error: raise for a bad prompt too.

        What no other prompt would mend is raised: an argument of a wrong type or length, a tokenizer or a package that
        is missing. What is wrong with one prompt or its parameters is said in that one's output, which has
        ``finish_reason="error"`` and the reason in ``stop_reason``, and the others are served; a
        ``RequestsFailedWarning`` if there are none. All methods that take several prompts keep to this.

        Raises:
            ValueError: an argument, or text for a model without a tokenizer; a bad prompt with ``raise_on_error``.
            ImportError: a package is missing: structured outputs need llguidance.
            RuntimeError: requests of ``add_request`` are unfinished; their outputs would be lost.
        """
        items = prompt_list(prompts)
        return self._serve("generate", items, sampling_params, use_tqdm, priority, raise_on_error, lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        raise_on_error: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """``generate`` for conversations, through the model's chat template; ``prompt`` is what that makes of them.

        The template is data of the checkpoint: it runs in a process of its own, with limits of time and memory.
        Special tokens that a message spells stay text.

        Args:
            messages: a conversation or a list of them; each a list of dicts with ``role`` and ``content``.
            sampling_params: None: ``get_default_sampling_params()``, which the first such call shows on stderr.
            chat_template: a Jinja template instead of the model's own.
            add_generation_prompt: end with what makes the model answer as the assistant.
            continue_final_message: end within the last message instead, for the model to go on with; needs
                ``add_generation_prompt=False``.
            tools, documents: JSON schemas of functions, and dicts, for a template that uses them.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.

        Raises:
            ValueError, RuntimeError: as ``generate``.
        """
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "documents": documents,
            "chat_template_kwargs": chat_template_kwargs,
        }
        items: list[Any] = []
        conversations = messages_list(messages)
        self._check_room(len(conversations))
        for conversation in conversations:
            try:
                items.append(self.encode_chat(conversation, **options))
            except ValueError as error:
                items.append(error)
        params = self.chat_sampling_params() if sampling_params is None else sampling_params
        return self._serve("chat", items, params, use_tqdm, priority, raise_on_error, lora_request)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]] | None = None,
        *,
        top_logprobs: int = 0,
        split_special_tokens: bool | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        raise_on_error: bool = False,
    ) -> list[ScoreOutput]:
        """How likely the given ``continuations`` are after their prompts; nothing is generated.

        Without ``continuations`` the tokens of the prompts are scored, from the second on. A text is scored as if it
        was not cut in two: it is encoded with its prompt. The head of the model runs for scored tokens alone, and
        prompts that begin alike are computed once, as in ``generate``.

        Args:
            prompts: as those of ``generate``.
            continuations: texts or lists of token ids, one for each prompt; a single prompt may have any number.
            top_logprobs: give so many of the most likely tokens too; -1: as many as the engine's ``max_logprobs``.
            split_special_tokens: as that of ``SamplingParams``, for texts.
            use_tqdm, lora_request, priority: as in ``generate``.
            raise_on_error: as in ``generate``; otherwise the output of a bad prompt has the reason in ``error``.

        Returns:
            An output for each prompt, or for each continuation of a single one, in their order.

        Raises:
            ValueError: the arguments do not pair up, or ``raise_on_error`` and a prompt is bad.
            RuntimeError: requests of ``add_request`` are unfinished; their outputs would be lost.
        """
        params = scoring_params(top_logprobs, self.config.max_logprobs, split_special_tokens)
        items = scored_prompts(prompts, continuations)
        outputs = self._serve("score", items, params, use_tqdm, priority, raise_on_error, lora_request)
        return [score_output(output, has_top_logprobs=top_logprobs != 0) for output in outputs]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> EncodedPrompt:
        """The prompt that ``chat`` makes of one conversation, for ``stream``, ``add_request`` and the others.

        Args:
            options: those of ``chat``, from ``chat_template`` on.

        Raises:
            ValueError: the conversation or the template does not allow it.
            RuntimeError: the engine is closed.
        """
        self._check_open()
        text, token_ids = self._chat_encoder.encode(messages, self.scheduler.request_capacity, **options)
        return EncodedPrompt(text, token_ids)

    def _serve(
        self,
        kind: str,
        items: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        raise_on_error: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        """Serve prompts until all have ended. An item may also be the ``ValueError`` of a prompt that is refused."""
        self._own_process.check()
        self._check_room(len(items))
        params = pair_sampling_params(sampling_params, len(items))
        priorities, adapters = pair_priorities(priority, len(items)), pair_lora_requests(lora_request, len(items))
        for value in priorities:
            self._check_priority(value)
        if self._core.entries.keys() - self._streams.keys():
            raise RuntimeError(f"{kind}() while requests of add_request() are unfinished: finish or abort them first")
        with self._interrupts:
            request_ids = [self._unused_id(kind) for _ in items]
            settings = dict(zip(request_ids, zip(params, priorities, adapters, strict=True), strict=True))

            def add(request_id: str, prompt: Any) -> None:
                own, urgency, adapter = settings[request_id]
                self._add(request_id, prompt, own, urgency, "final", adapter)

            try:
                outputs = self._for_each(zip(request_ids, items, strict=True), add, raise_on_error)
                with tqdm(total=len(items), initial=len(outputs), unit="prompt", disable=not use_tqdm) as bar:
                    while len(outputs) < len(items):
                        self._interrupts.take()
                        for output in self._advance():
                            outputs[output.request_id] = output
                            bar.update()
            finally:
                self.abort(request_ids)
        warn_if_all_failed(list(outputs.values()))
        return [outputs[request_id] for request_id in request_ids]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        *,
        ignore_eos: bool = False,
        split_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """The likeliest continuations of every prompt, as transformers' ``generate(num_beams=beam_width)`` finds them.

        Beams share the KV blocks of what they have in common, and copy the last one when they part. Other requests are
        served meanwhile; ``step`` returns their outputs.

        Args:
            max_tokens: most tokens to generate; None: as many as fit in ``max_model_len``.
            length_penalty: score = (sum of log-probabilities) / (number of tokens) ** length_penalty.
            ignore_eos: go on after an end-of-text token.
            split_special_tokens: as that of ``SamplingParams``.
            lora_request: the adapter of all prompts.
            raise_on_error: as in ``generate``.

        Returns:
            For each prompt the ``beam_width`` best in ``outputs``, best first, with their ``cumulative_logprob``.

        Raises:
            ValueError: an argument, with what is allowed; with ``raise_on_error`` also a bad prompt.
            RuntimeError: the engine is closed.
        """
        self._check_open()
        if not isinstance(ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, given {shown(ignore_eos)}")
        eos_token_ids = () if ignore_eos else self.model_config.eos_token_ids
        check_lora_request(lora_request)
        check_beam_search(beam_width, max_tokens, length_penalty, eos_token_ids, self.config.max_logprobs)
        params = SamplingParams(max_tokens=max_tokens, split_special_tokens=split_special_tokens)
        groups: dict[str, BeamGroup] = {}

        def prepare(request_id: str, prompt: Any) -> None:
            prepared = self._admission.prepare(prompt, params, lora_request)
            groups[request_id] = BeamGroup(request_id, prepared, beam_width, length_penalty, eos_token_ids)

        items = prompt_list(prompts)
        self._check_room(len(items))
        request_ids = [self._unused_id("beam_search") for _ in items]
        outputs = self._for_each(zip(request_ids, items, strict=True), prepare, raise_on_error)
        self._run_beams(groups, outputs)
        warn_if_all_failed(list(outputs.values()))
        return [outputs[request_id] for request_id in request_ids]

    def _run_beams(self, groups: dict[str, BeamGroup], outputs: dict[str, RequestOutput]) -> None:
        """Serve beam searches until all have ended, and take their outputs."""
        with self._interrupts:
            try:
                for group in groups.values():
                    self._core.add_beams(group)
                while groups:
                    self._interrupts.take()
                    self._undelivered += self._advance()
                    for request_id, group in list(groups.items()):
                        if group.failure is not None or (group.has_all and not self._core.advance_beams(group)):
                            outputs[request_id] = group.output(self.tokenizer)
                            self._core.end_beams(group)
                            del groups[request_id]
            finally:
                for group in groups.values():
                    self._core.end_beams(group)

    # -- Reports

    def check(self, prompts: Sequence[Prompt] | None = None, max_tokens: int = 16) -> CheckReport:
        """Whether compiled steps, uncompiled steps and transformers' own classes agree on the model, on a few prompts.

        For whoever doubts a model. transformers loads it a second time, where there is memory for that.

        Args:
            prompts: None: four of our own, of random tokens where the model has no tokenizer.
            max_tokens: to generate for each prompt.

        Returns:
            A table as ``str()``; ``agrees`` is the verdict.

        Raises:
            ValueError: an argument or a prompt does not allow it.
            RuntimeError: requests are unfinished.
        """
        self._own_process.check()
        if self.has_unfinished_requests():
            raise RuntimeError("check() while requests are unfinished: finish or abort them first")
        with own_settings(self.runner.num_threads):
            return check(self, self.generate, checkpoint_directory(self.config), prompts, max_tokens)

    def stats(self) -> EngineStats:
        """Counts since the engine was made, and its state now."""
        return self._core.counts.stats(self.scheduler, self.runner.times)

    def compile_report(self) -> CompileReport:
        """Per compiled graph: graph breaks, recompiles since ready, seconds, cache hit or miss."""
        return self.runner.compile_report()

    def memory_report(self) -> MemoryLedger:
        """What the memory goes to, as measured at the start: weights, graphs, activations, KV pool, what stays free."""
        pool, limits = self.scheduler.pool, self.runner.limits
        num_tokens = min(pool.num_blocks * limits.block_size, limits.max_num_seqs * limits.max_model_len)
        size = 0 if self._draft_source is None else text_bytes(self._draft_source, num_tokens)
        ledger = self.runner.memory_ledger
        return ledger.with_text_of_drafter(size) if size else ledger

    def reset_report(self, *, profile_steps: int = 0) -> None:
        """Start a new report: what was served so far, a warm-up perhaps, is not in it.

        Args:
            profile_steps: so many steps of each bucket are run a second time under torch's profiler, for the shares of
                attention, linears and sampling. No time in the report counts that, but the run takes longer by it.
        """
        integer("profile_steps", profile_steps, 0, 1000)
        profiler = StepProfiler(profile_steps, self.runner.device) if profile_steps else None
        if isinstance(self.runner, ModelRunner):
            self.runner.profiler = profiler
        elif profile_steps:
            raise ValueError(
                f"profile_steps must be 0 with model_process=True or ranks (the profiler has to be in the process that "
                f"runs the steps), given {profile_steps}"
            )
        with self._interrupts:
            self._core.reset_log(profiler.pauses if profiler else None)
        self._stats_before = self.stats()

    def report(self, *, measure_limits: bool = True) -> RunReport:
        """What was served since the start or ``reset_report``, and how near the machine's limits that was.

        Args:
            measure_limits: measure the machine's limits, once and in a few seconds, if no earlier run did, or if this
                run came to more than 110% of what was measured.

        Raises:
            RuntimeError: they are to be measured and too little memory is free for that, or this process is a fork of
                the engine's.
        """
        if measure_limits:
            self._own_process.check()
        runner = self.runner
        with own_settings(runner.num_threads):
            return make_report(
                self._core.log,
                self.stats().since(self._stats_before),
                trace=self.trace(),
                work=self._work,
                compile_report=self.compile_report(),
                memory=self.memory_report(),
                profiler=runner.profiler,
                device=runner.device,
                dtype=runner.dtype,
                exact=runner.exact,
                model_code=code_of(self.model_config),
                measure_limits=measure_limits,
            )

    def limit_seconds(self) -> tuple[float, float] | None:
        """Since ``reset_report``: seconds that the steps would have taken at the machine's limits, and that they took.

        None where the limits were unknown at the start: ``report`` measures them. Much cheaper than a report, for who
        asks once a second.
        """
        return None if self._limit_seconds is None else self._limit_seconds.total(self._core.log)

    def trace(self) -> dict[str, Any]:
        """The shapes of all steps since the start or ``reset_report``, as ``compiled-llm tune buckets`` reads them."""
        model = self.config.model or "the bundled model"
        return make_trace(self._core.log, self.runner.limits, self.compile_report(), model, self.runner.device)


def _weights_of(engine: StepEngine) -> Any:
    """The weights that steps run with; of another process, what is known of them without their numbers."""
    runner = engine.runner
    if isinstance(runner, ModelRunner):
        return runner.steps.weights
    config = dataclasses.replace(engine.model_config, max_position_embeddings=runner.limits.max_model_len)
    linears = linears_of(engine.config, engine.model_config, runner.device, runner.dtype)
    return family_of(config).describe(config, runner.dtype, linears).weights
