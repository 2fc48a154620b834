"""Whether an engine computes what its model's files say: compiled, uncompiled and by transformers, on a few prompts.

All three give a log-probability to every token of the prompts and of what the compiled engine generates. Compiled and
uncompiled steps must agree to the bit, on a GPU within the tolerance; transformers, which adds up in another order and
rounds elsewhere, within the tolerance of the model's dtype. A model that was read or computed wrongly is off by whole
nats.
"""

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.step_engine import StepEngine
from compiled_llm.text.prompts import EncodedPrompt, Prompt, prompt_list
from compiled_llm.worker.memory import free_bytes

Generate = Callable[..., list[RequestOutput]]
"""``CompiledEngine.generate``."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Question: what is 17 + 25?\nAnswer:",
    "import os\n\n\ndef files_of(directory):\n    return sorted(os.listdir(directory))\n\n\n" * 12,
)
_LENGTHS = (3, 17, 64, 300)  # of random prompts, in tokens, for a model without a tokenizer
# Nats, on average over all tokens. Within one dtype the order of sums is all that differs, and where is rounded.
_TOLERANCES = {torch.float32: 0.001, torch.float16: 0.02, torch.bfloat16: 0.1}
_LARGEST = 20  # times the tolerance, of a single token
_QUANTISED_TOLERANCE = 0.05  # of a KV cache of one byte an element, besides


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two ways to compute the same tokens' log-probabilities are apart.

    Attributes:
        mean, largest: of the absolute differences, in nats.
    """

    mean: float
    largest: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Difference":
        found = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        return cls(statistics.fmean(found), max(found))

    def within(self, tolerance: float) -> bool:
        return self.mean <= tolerance and self.largest <= _LARGEST * tolerance

    def __str__(self) -> str:
        return "equal" if self.largest == 0 else f"{self.mean:.2g}, {self.largest:.2g}"


@dataclasses.dataclass(frozen=True)
class PromptCheck:
    """What one prompt showed.

    Attributes:
        prompt: its beginning, for the table.
        num_prompt_tokens, num_tokens: of the prompt, and generated.
        uncompiled: compiled steps against uncompiled ones, over all these tokens but the first; infinite where they
            generate other tokens.
        transformers: compiled steps against transformers; None where that did not run.
        likeliest: how many of the generated tokens are transformers' likeliest, or as likely within the tolerance.
    """

    prompt: str
    num_prompt_tokens: int
    num_tokens: int
    uncompiled: Difference
    transformers: Difference | None
    likeliest: int


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What ``check`` found. ``str()`` of it is a table.

    Attributes:
        model, dtype, kv_cache_dtype: of the engine.
        is_compiled: False for an engine that was made without compiling.
        exact: compiled and uncompiled steps must agree to the bit, else within the tolerance.
        tolerance: of a mean difference, in nats.
        without: why transformers did not run; None: it did.
    """

    model: str
    dtype: str
    kv_cache_dtype: str
    is_compiled: bool
    exact: bool
    tolerance: float
    rows: tuple[PromptCheck, ...]
    without: str | None

    def __repr__(self) -> str:
        return str(self)

    @property
    def agrees(self) -> bool:
        """Whether all that ran agrees."""
        return all(self._agrees(row) for row in self.rows)

    def _agrees(self, row: PromptCheck) -> bool:
        other = row.transformers
        alike = row.uncompiled.within(0.0 if self.exact else self.tolerance)
        return alike and (other is None or (other.within(self.tolerance) and row.likeliest == row.num_tokens))

    def __str__(self) -> str:
        titles = ("prompt", "tokens", "generated", "uncompiled", "transformers", "its likeliest", "result")
        lines = [titles]
        for row in self.rows:
            numbers = str(row.num_prompt_tokens), str(row.num_tokens), str(row.uncompiled)
            theirs = ("-", "-") if row.transformers is None else (str(row.transformers), f"{row.likeliest}")
            lines.append((row.prompt, *numbers, *theirs, "agrees" if self._agrees(row) else "DIFFERS"))
        widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
        text = [f"{self.model}, {self.dtype}, KV cache {self.kv_cache_dtype}"]
        text += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        how = "compiled steps" if self.is_compiled else "this engine, which runs uncompiled,"
        uncompiled = "none" if self.exact else f"a mean of {self.tolerance:g}"
        text.append(
            f"Differences of log-probabilities between {how} and others, in nats: mean, largest; of all tokens.\n"
            f"Allowed: {uncompiled} to uncompiled steps, a mean of {self.tolerance:g} to transformers."
        )
        if self.without is not None:
            text.append(f"transformers did not run: {self.without}")
        return "\n".join(text)


def check(
    engine: StepEngine, generate: Generate, directory: Path, prompts: Sequence[Prompt] | None, max_tokens: int
) -> CheckReport:
    """As ``CompiledEngine.check``; ``generate`` serves with ``engine``, and ``directory`` has the model's files."""
    integer("max_tokens", max_tokens, 1, engine.runner.limits.max_model_len - 1)
    runner = engine.runner
    items = _default_prompts(engine, max_tokens) if prompts is None else prompt_list(prompts)
    if not items:
        raise ValueError("prompts must not be empty")
    compiled = _serve(generate, items, max_tokens, "compiled")
    with runner.uncompiled():
        uncompiled = _serve(generate, items, max_tokens, "uncompiled")
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in compiled]
    without = _obstacle(engine)
    logits = itertools.repeat(None) if without else _transformers_logits(directory, sequences, engine)
    tolerance = _TOLERANCES[runner.dtype]
    if any(dtype.itemsize == 1 for dtype in runner.cache_dtypes):
        tolerance += _QUANTISED_TOLERANCE
    report = runner.compile_report()
    return CheckReport(
        model=engine.config.model or "the bundled model",
        dtype=str(runner.dtype)[6:],
        kv_cache_dtype=", ".join(sorted({str(dtype)[6:] for dtype in runner.cache_dtypes})),
        is_compiled=report.graphs > 0,
        exact=runner.device.type == "cpu" and runner.exact == "yes",
        tolerance=tolerance,
        rows=tuple(
            _row(ours, other, theirs, tolerance)
            for ours, other, theirs in zip(compiled, uncompiled, logits, strict=False)
        ),
        without=without,
    )


def _default_prompts(engine: StepEngine, max_tokens: int) -> list[Any]:
    room = engine.runner.limits.max_model_len - max_tokens
    if engine.tokenizer is None:
        numbers = random.Random(0)
        vocabulary = range(engine.model_config.vocab_size)
        return [numbers.choices(vocabulary, k=min(length, room)) for length in _LENGTHS]
    return [EncodedPrompt(text, engine.tokenizer.encode(text)[:room]) for text in PROMPTS]


def _serve(generate: Generate, items: Sequence[Any], max_tokens: int, salt: str) -> list[RequestOutput]:
    """Greedy outputs with all log-probabilities. ``salt``: nothing that another way computed is found in the cache."""
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    prompts = [_salted(item, salt) for item in items]
    outputs = generate(prompts, params, use_tqdm=False, raise_on_error=True)
    for output in outputs:
        if output.outputs[0].finish_reason != "length":
            raise RuntimeError(f"a prompt of the check ended early: {output.outputs[0].stop_reason}")
    return outputs


def _salted(item: Any, salt: str) -> Any:
    if isinstance(item, EncodedPrompt):
        return item._replace(cache_salt=f"check {salt}")
    if isinstance(item, dict):
        return {**item, "cache_salt": f"{item.get('cache_salt', '')} check {salt}"}
    return {"prompt" if isinstance(item, str) else "prompt_token_ids": item, "cache_salt": f"check {salt}"}


def _logprobs(output: RequestOutput) -> list[float]:
    """Of all tokens of prompt and output but the first."""
    (completion,) = output.outputs
    rows = [row for row in [*(output.prompt_logprobs or []), *(completion.logprobs or [])] if row is not None]
    return [next(iter(row.values())).logprob for row in rows]


def _row(ours: RequestOutput, other: RequestOutput, logits: torch.Tensor | None, tolerance: float) -> PromptCheck:
    """``logits``: transformers', ``[T, V]`` float32, of the tokens of ``ours``."""
    tokens, generated = ours.prompt_token_ids, ours.outputs[0].token_ids
    theirs, likeliest = None, 0
    if logits is not None:
        chosen = torch.tensor([*tokens, *generated])[1:, None]
        logprobs = logits.log_softmax(-1)[:-1]
        found = logprobs.gather(1, chosen)
        theirs = Difference.of(_logprobs(ours), found[:, 0].tolist())
        # Two tokens that are as good as equally likely may change places.
        close = logprobs.amax(-1, keepdim=True) - found <= 2 * max(tolerance, theirs.largest)
        likeliest = int(close[len(tokens) - 1 :].sum())
    same = generated == other.outputs[0].token_ids
    text = ours.prompt if ours.prompt is not None else str(tokens)
    return PromptCheck(
        prompt=repr(text if len(text) <= 32 else f"{text[:29]}...")[1:-1],
        num_prompt_tokens=len(tokens),
        num_tokens=len(generated),
        uncompiled=Difference.of(_logprobs(ours), _logprobs(other)) if same else Difference(math.inf, math.inf),
        transformers=theirs,
        likeliest=likeliest,
    )


def _obstacle(engine: StepEngine) -> str | None:
    """Why transformers cannot run the same model here."""
    if engine.config.load_format == "dummy":
        return "random weights (load_format='dummy') are in no file"
    needed, free = round(1.1 * engine.runner.weight_bytes), free_bytes(engine.runner.device)
    if needed > free:
        where = engine.runner.device
        return f"it needs {needed >> 20} MiB for a copy of the weights, and {free >> 20} are free on {where}"
    return None


def _transformers_logits(directory: Path, sequences: Sequence[list[int]], engine: StepEngine) -> Any:
    """Logits ``[T, V]`` of each sequence, float32 on the host: transformers' own classes, in the engine's dtype."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=engine.runner.dtype,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
    )
    model = model.to(engine.runner.device).eval()
    for sequence in sequences:
        with torch.no_grad():
            yield model(torch.tensor([sequence], device=engine.runner.device)).logits[0].float().cpu()
