"""What the benchmarks that serve requests share: flags, requests, the engine or transformers, and what they did.

The flags of the requests are those of ``vllm bench``. Without any of them, the requests have random tokens.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, check_least, engine_config, errors_end
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.outputs import EngineStats
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench import hf
from compiled_llm.bench.workloads import WORKLOADS, Requests, Timing, WorkloadRequest, random_tokens
from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer
from compiled_llm.checkpoint.shapes import model_of
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.report import machine_limits
from compiled_llm.text.prompts import check_token_ids
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.worker.device import resolve_device

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 32, 1024, 128  # of random requests
_SMALLEST_MODEL_LEN = 1024
BACKENDS = ("compiled-llm", "hf")
# Flags of the engine that transformers has too. It has none of the sampling flags.
_HF_FLAGS = ("model", "tokenizer", "dtype", "device", "seed")
_SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "disable_detokenize")
# Flags of random requests alone, and flags of all requests except those of a workload.
_RANDOM_FLAGS = ("input_len", "random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len")
_LENGTH_FLAGS = ("dataset_name", "dataset_path", "num_prompts", "output_len", *_RANDOM_FLAGS)


# ---- flags ----------------------------------------------------------------------------------------------------------


def add_backend_flags(parser: FlagParser) -> None:
    """``--backend hf``: transformers.generate instead of the engine; and where the result goes."""
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="hf is transformers.generate")
    parser.add_argument("--output-json", type=tables.output_file, metavar="FILE", help="write the JSON line there too")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """How the engine samples, and its report."""
    parser.add_argument("--report", type=Path, metavar="DIR", help="write the engine's report, as HTML and JSON")
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, help="(default: 1)")
    group.add_argument("--top-k", type=int, default=0, help="0: all (default: 0)")
    group.add_argument("--disable-detokenize", action="store_true", help="leave the outputs as token ids")


def add_request_flags(parser: FlagParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--workload", choices=WORKLOADS, help="of docs/performance.md; it defines all requests")
    add("--dataset-name", choices=("random", "custom", "sharegpt"), help="custom where there is a --dataset-path")
    rows = "rows with prompt or prompt_token_ids, and output_len unless --output-len is given; or ShareGPT's JSON"
    add("--dataset-path", type=Path, metavar="FILE.jsonl", help=rows)
    add("--num-prompts", type=int, help=f"default: {NUM_PROMPTS} random ones, or all of a file, else its first ones")
    add("--input-len", type=int, help="the same as --random-input-len")
    add("--output-len", type=int, help="of every request; overrides those of the rows")
    add("--random-input-len", type=int, help=f"tokens after the prefix (default: {INPUT_LEN})")
    add("--random-output-len", type=int, help=f"default: {OUTPUT_LEN}")
    spread = "draw both lengths from [length * (1 - R), length * (1 + R)] (default: 0)"
    add("--random-range-ratio", type=float, metavar="R", help=spread)
    add("--random-prefix-len", type=int, help="tokens that all prompts start with (default: 0)")
    parser.seldom |= {f"--{name.replace('_', '-')}" for name in (*_RANDOM_FLAGS, "dataset_name")} - {"--input-len"}


def check_serving(args: argparse.Namespace, parser: FlagParser) -> None:
    """``ValueError`` for a sampling parameter, a ``--report`` or a backend that cannot be; nothing is loaded yet."""
    sampling_of(args, [WorkloadRequest([], 1)])
    if args.report is not None and args.report.exists() and not args.report.is_dir():
        raise ValueError(f"--report {args.report} is a file: give a directory")
    own = {field.name for field in dataclasses.fields(EngineConfig)} - set(_HF_FLAGS)
    for name in sorted(own | {"report", *_SAMPLING_FLAGS}) if getattr(args, "backend", None) == "hf" else []:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} has no meaning for --backend hf: leave it out")


# ---- model and engine -----------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """The model of the flags, before its weights are loaded.

    Attributes:
        name: the checkpoint's or the shape's, for the results.
        config: ``max_model_len`` may still be None.
        tokenizer: None if the directory has none, as for a shape.
    """

    name: str
    directory: Path
    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None


@contextlib.contextmanager
def described_model(args: argparse.Namespace) -> Iterator[Model]:
    """The model and the engine's config of the flags; ``ValueError`` for bad ones."""
    changes: dict[str, Any] = {}
    if args.model is None:
        if args.load_format not in ("auto", "dummy"):
            raise ValueError(
                f"--load-format must be 'dummy' with --shape, which has no weights, given {args.load_format!r}: "
                "give --model"
            )
        changes = {"load_format": "dummy"}
    with model_of(args) as named:
        config = dataclasses.replace(engine_config(args), **{"model": named["model"], **changes})
        directory = checkpoint_directory(config)
        yield Model(
            name=args.model or args.shape,
            directory=directory,
            config=config,
            model_config=read_config(directory),
            tokenizer=load_tokenizer(config, directory),
        )


def config_for(model: Model, requests: Requests) -> EngineConfig:
    """The config, with a ``max_model_len`` that the requests fit in if the flags give none.

    It is 1024 or the next larger power of two, so that workloads of about the same length share compiled code.
    ``ValueError``: a request is longer than ``max_model_len`` or than the model allows.
    """
    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
    most = model.model_config.max_position_embeddings
    allowed = min(most, model.config.max_model_len or most)
    if longest > allowed:
        raise ValueError(
            f"the longest request must fit in {allowed} tokens, prompt and output together, given {longest}: "
            "shorten it, or raise --max-model-len where the model allows it"
        )
    if model.config.max_model_len is not None:
        return model.config
    length = max(_SMALLEST_MODEL_LEN, 1 << (longest - 1).bit_length())
    return dataclasses.replace(model.config, max_model_len=min(most, length))


def sampling_of(args: argparse.Namespace, requests: Requests, *, ignore_eos: bool = True) -> list[SamplingParams]:
    """Parameters of each request: ``output_len`` tokens, or fewer if ``ignore_eos`` is False and the model ends it."""
    return [
        SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_tokens=request.output_len,
            ignore_eos=ignore_eos,
            detokenize=not args.disable_detokenize,
        )
        for request in requests
    ]


# ---- requests -------------------------------------------------------------------------------------------------------


def requests_of(args: argparse.Namespace, model: Model) -> Requests:
    return requests_for(args, model.model_config.vocab_size, model.tokenizer)


def requests_for(args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None) -> Requests:
    """The requests of the flags; ``ValueError`` for bad ones. Text is encoded here: no measured time includes it."""
    if args.workload is not None:
        _refuse(args, _LENGTH_FLAGS, "--workload, which defines its requests")
        return WORKLOADS[args.workload](vocab_size, args.seed)
    check_least(args, num_prompts=1, input_len=1, output_len=1, random_input_len=1, random_output_len=1)
    check_least(args, random_prefix_len=0)
    if args.dataset_path is None:
        if args.dataset_name in ("custom", "sharegpt"):
            raise ValueError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
        return _random_requests(args, vocab_size)
    if args.dataset_name == "random":
        raise ValueError(
            f"--dataset-name must be custom or sharegpt with --dataset-path {args.dataset_path}, given 'random'"
        )
    _refuse(args, _RANDOM_FLAGS, "--dataset-path, whose prompts have their own lengths")
    read = _read_conversations if args.dataset_name == "sharegpt" else _read_rows
    requests = read(args, vocab_size, tokenizer)
    if args.num_prompts is not None and args.num_prompts > len(requests):
        raise ValueError(
            f"--num-prompts must be at most {len(requests)}, the rows of {args.dataset_path}, given {args.num_prompts}"
        )
    return requests[: args.num_prompts]


def _refuse(args: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} cannot be given with {reason}: leave one of the two out")


def _random_requests(args: argparse.Namespace, vocab_size: int) -> Requests:
    for general, own in (("input_len", "random_input_len"), ("output_len", "random_output_len")):
        if getattr(args, general) is not None:
            _refuse(args, (own,), f"--{general.replace('_', '-')}, which means the same")
    input_len = _first_given(args.input_len, args.random_input_len, INPUT_LEN)
    output_len = _first_given(args.output_len, args.random_output_len, OUTPUT_LEN)
    prefix_len = _first_given(args.random_prefix_len, 0)
    ratio = 0.0 if args.random_range_ratio is None else args.random_range_ratio
    if not 0 <= ratio < 1:
        raise ValueError(f"--random-range-ratio must be at least 0 and below 1, given {ratio}")

    rng = random.Random(args.seed)
    prefix = random_tokens(rng, vocab_size, prefix_len)

    def length(mean: int) -> int:
        return rng.randint(max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio)))

    lengths = [(length(input_len), length(output_len)) for _ in range(_first_given(args.num_prompts, NUM_PROMPTS))]
    return [WorkloadRequest(prefix + random_tokens(rng, vocab_size, i), o) for i, o in lengths]


def _first_given(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _read_rows(args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None) -> Requests:
    path, output_len = args.dataset_path, args.output_len
    # Not splitlines(), which also splits at line separators that JSON strings may hold.
    lines = path.read_text(encoding="utf-8").split("\n")
    requests = [
        _parse_row(f"{path}, line {number}", line, output_len, tokenizer, vocab_size)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise ValueError(f"--dataset-path {path} must hold at least one row, given none")
    return requests


def _read_conversations(args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None) -> Requests:
    """The first turn of each conversation that has an answer, as long as that one, drawn by the seed; as vLLM does."""
    path = args.dataset_path
    if tokenizer is None:
        raise ValueError("--dataset-name sharegpt has texts, and the model has no tokenizer: give --tokenizer")
    try:
        turns = [row["conversations"] for row in json.loads(path.read_text(encoding="utf-8"))]
        pairs = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) > 1]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--dataset-path {path} must be a JSON list of objects with conversations, lists of objects with value; "
            f"given {type(error).__name__}: {error}"
        ) from error
    random.Random(args.seed).shuffle(pairs)
    found: Requests = []
    for prompt, answer in pairs:
        token_ids = tokenizer.encode(prompt)
        count = args.output_len or len(tokenizer.encode_piece(answer))
        # vLLM's bounds: what is very short or long says little of a chat.
        if min(len(token_ids), count) >= 4 and len(token_ids) <= 1024 and len(token_ids) + count <= 2048:
            found.append(WorkloadRequest(token_ids, count))
        if len(found) == args.num_prompts:
            break
    if not found:
        raise ValueError(
            f"--dataset-path {path} must have a conversation of an answered turn of usual length, given none"
        )
    return found


def _parse_row(
    where: str, line: str, output_len: int | None, tokenizer: Tokenizer | None, vocab_size: int
) -> WorkloadRequest:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("prompt_token_ids" in row):
        raise ValueError(f"{where}: a row must be an object with either 'prompt' or 'prompt_token_ids'")
    unknown = sorted(row.keys() - {"prompt", "prompt_token_ids", "output_len"})
    if unknown:
        raise ValueError(f"{where}: unknown key: {', '.join(unknown)}. Allowed, apart from the prompt: output_len")
    count = row.get("output_len") if output_len is None else output_len
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{where}: output_len must be an integer of at least 1, given {count!r}: or give --output-len")
    if "prompt_token_ids" in row:
        token_ids = row["prompt_token_ids"]
        if not isinstance(token_ids, list):
            raise ValueError(f"{where}: prompt_token_ids must be a list of integers, given {token_ids!r:.100}")
        check_token_ids(f"{where}: prompt_token_ids", token_ids, vocab_size)
    elif tokenizer is None:
        raise ValueError(f"{where}: the model has no tokenizer: give prompt_token_ids, or --tokenizer")
    elif not isinstance(row["prompt"], str):
        raise ValueError(f"{where}: prompt must be a str, given {row['prompt']!r:.100}")
    else:
        token_ids = tokenizer.encode(row["prompt"])
    if not token_ids:
        raise ValueError(f"{where}: the prompt must not be empty")
    return WorkloadRequest(token_ids, count)


# ---- what they did --------------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float], shown: Sequence[float]) -> dict[str, float]:
    """Percentile -> value, interpolated between neighbours as numpy does; keys like "99" and "99.9"."""
    return {f"{p:g}": float(np.percentile(values, p)) for p in shown}


def summary(metric: str, values: Sequence[float], shown: Sequence[float]) -> dict[str, float]:
    """``mean_ttft_ms``, ``median_``, ``std_`` and ``p99_`` of seconds, for ``metric`` "ttft"; 0 if there is none."""
    milliseconds = [value * 1e3 for value in values] or [0.0]
    result = {
        f"mean_{metric}_ms": float(np.mean(milliseconds)),
        f"median_{metric}_ms": float(np.median(milliseconds)),
        f"std_{metric}_ms": float(np.std(milliseconds)),
    }
    return result | {f"p{p}_{metric}_ms": value for p, value in percentiles(milliseconds, shown).items()}


def generate(engine: CompiledEngine, requests: Requests, params: list[SamplingParams]) -> Timing:
    """Requests that are submitted at once; each must get exactly the tokens that it asks for."""
    prompts = [request.prompt_token_ids for request in requests]
    started = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    found = Timing(time.perf_counter() - started, [], [])
    for output, request in zip(outputs, requests, strict=True):
        completion, metrics = output.outputs[0], output.metrics
        count = len(completion.token_ids)
        if count != request.output_len:
            raise RuntimeError(
                f"request {output.request_id} got {count} tokens of {request.output_len}: "
                f"{completion.finish_reason}, {completion.stop_reason}"
            )
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        found.ttfts.append(metrics.first_token_time - metrics.arrival_time)
        if count > 1:
            found.tpots.append((metrics.finished_time - metrics.first_token_time) / (count - 1))
    return found


class EngineRuns:
    """Runs of the requests of the flags on the engine; figures are of what came since ``begin``.

    Attributes:
        name: the model's.
    """

    def __init__(self, engine: CompiledEngine, model: Model, requests: Requests, args: argparse.Namespace) -> None:
        self.engine, self.requests, self.name, self._args = engine, requests, model.name, args
        self.tokenizer, self.device = model.config.tokenizer or model.name, engine.runner.device
        self._before = engine.stats()

    def begin(self, *, empty_cache: bool = False) -> None:
        """What counts begins. ``empty_cache``: no prompt of before is found."""
        if empty_cache:
            self.engine.reset_prefix_cache()
        self.engine.reset_report()
        self._before = self.engine.stats()

    def run(self, requests: Requests) -> Timing:
        return generate(self.engine, requests, sampling_of(self._args, requests))

    def steps(self) -> dict[str, float]:
        return steps_between(self._before, self.engine.stats())

    def figures(self, start_seconds: float) -> dict[str, Any]:
        stats = self.engine.stats()
        blocks = {"peak_used_blocks": stats.peak_used_blocks, "num_kv_blocks": stats.num_kv_blocks}
        return {"steps": self.steps(), **blocks, "engine": engine_facts(self.engine, start_seconds)}


class HfRuns:
    """The same runs with transformers, ``max_batch_size`` requests at a time."""

    def __init__(self, module: Any, model: Model, requests: Requests, max_batch_size: int) -> None:
        self.requests, self.name, self.device = requests, model.name, module.device
        self._module, self._max_batch_size = module, max_batch_size

    def begin(self, *, empty_cache: bool = False) -> None:
        """It keeps nothing between runs."""

    def run(self, requests: Requests) -> Timing:
        return hf.run(self._module, requests, self._max_batch_size)

    def figures(self, start_seconds: float) -> dict[str, Any]:
        facts = {"start_seconds": start_seconds, "dtype": str(self._module.dtype)[6:]}
        return {"hf_max_batch_size": self._max_batch_size, "engine": facts}


@contextlib.contextmanager
def started(
    program: str, args: argparse.Namespace, make_requests: Callable[[argparse.Namespace, Model], Requests]
) -> Iterator[tuple[Any, float]]:
    """``EngineRuns`` or ``HfRuns``, as ``--backend`` says, and the seconds of its start; afterwards the ``--report``.

    Bad arguments end ``program``.
    """
    with errors_end(program), described_model(args) as model:
        requests = make_requests(args, model)
        config, before = config_for(model, requests), time.perf_counter()
        if getattr(args, "backend", None) != "hf":
            engine = CompiledEngine.from_config(config)
        else:
            dummy, device = config.load_format == "dummy", resolve_device(args.device)
            module = hf.load(model.directory, config.dtype, device, args.seed, random_weights=dummy)
        seconds = time.perf_counter() - before
    if getattr(args, "backend", None) == "hf":
        yield HfRuns(module, model, requests, getattr(args, "hf_max_batch_size", None) or len(requests)), seconds
        return
    with engine:
        if args.report is not None:  # the machine's limits are measured before the runs, not after them
            machine_limits.measured(engine.runner.device, engine.runner.dtype)
        yield EngineRuns(engine, model, requests, args), seconds
        if args.report is not None:
            engine.report().write(args.report)
            print(f"\nReport: {args.report / 'report.html'}")


def steps_between(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Costs of the steps between two readings of an engine's statistics."""
    steps = max(1, after.num_steps - before.num_steps)
    padding = after.num_padding_tokens - before.num_padding_tokens
    computed = after.num_computed_tokens - before.num_computed_tokens
    return {
        "num_steps": after.num_steps - before.num_steps,
        "step_milliseconds": (after.execute_seconds - before.execute_seconds) / steps * 1e3,
        "launch_microseconds_a_step": (after.launch_seconds - before.launch_seconds) / steps * 1e6,
        "host_microseconds_a_step": (after.host_seconds - before.host_seconds) / steps * 1e6,
        "padding_share": padding / max(1, padding + computed),
        "num_computed_tokens": computed,
        "prefix_hit_tokens": after.prefix_hit_tokens - before.prefix_hit_tokens,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
    }


def engine_facts(engine: CompiledEngine, start_seconds: float) -> dict[str, Any]:
    """Sizes and dtypes of an engine, and figures of its start and its compiled graphs."""
    report, limits = engine.compile_report(), engine.runner.limits
    return {
        "start_seconds": start_seconds,
        "graphs": report.graphs,
        "graph_breaks": report.graph_breaks,
        "recompiles": report.recompiles,
        "compile_seconds": report.compile_seconds,
        "cuda_graph_bytes": sum(graph.cuda_graph_bytes for graph in report.reports),
        "cache_misses": report.cache_count("miss"),
        "enforce_eager": engine.config.enforce_eager,
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
        "kv_cache_dtype": engine.config.kv_cache_dtype,
        "max_model_len": limits.max_model_len,
        "bucket_sizes": limits.decode_bucket_sizes,
        "token_bucket_sizes": limits.token_bucket_sizes,
    }


def title(result: Mapping[str, Any], what: str) -> str:
    """Of a table: the backend, the model, its dtype, and what it served."""
    return f"{result['backend']}, {result['model']}, {result['engine']['dtype']}: {what}"


def engine_rows(result: Mapping[str, Any]) -> dict[str, str]:
    """What the engine's steps did and what was compiled, as rows of a table; none for transformers."""
    if "steps" not in result:
        return {}
    steps, facts = result["steps"], result["engine"]
    rows = {
        "steps": f"{steps['num_steps']} of {steps['step_milliseconds']:.2f} ms, host "
        f"{steps['host_microseconds_a_step']:.0f} us each, padding {steps['padding_share']:.1%}, "
        f"{steps['prefix_hit_tokens']} tokens found in the prefix cache",
        "KV blocks": f"peak {result['peak_used_blocks']} of {result['num_kv_blocks']}",
    }
    start = f"start {facts['start_seconds']:.1f} s"
    if facts["enforce_eager"]:
        return rows | {"compiled": f"nothing; {start}"}
    graphs = f"{facts['graphs']} graphs, {facts['graph_breaks']} graph breaks, {facts['recompiles']} recompiles"
    compiling = f"of which compiling {facts['compile_seconds']:.1f} s, {facts['cache_misses']} not found in the cache"
    return rows | {"compiled": f"{graphs} after ready, {start} {compiling}"}
