"""What speculation gives: tokens a second of the same requests with each method and without, engines in turns.

    compiled-llm bench speculation --batch-sizes 1 4 16
    compiled-llm bench speculation --prompts FILE --temperatures 0 0.8

Prompts are edits of code: a function, and a comment that asks for it once more with a name changed. ``--prompts`` takes
others, a JSON string in each line. The model need not be good at it: what it repeats is drafted. "suffix" keeps no
outputs here, since every round serves the same prompts. Every method must give the tokens of the engine without one, or
the benchmark ends. Ratios are medians over rounds of the tokens a second within a round.

Two engines of one process that do the same differ by some percent, always the same one being faster, by where their
memory lies: ``--processes`` measures in several, with engines made in another order in each, and gives the median of
their ratios, the lowest and the highest; the engine without a method is there twice then, which says what such a ratio
is worth.

``--trees`` has methods that can draft trees do so, too. ``--acceptance`` runs each network that drafts once more,
uncompiled, and says how often its drafts are right beside what rejection sampling would accept. ``--widen`` measures
the model, its layer for ``mtp`` and the heads among the drafters at the size of a shape (``widening.py``).
``--vllm-python`` has vLLM serve the same prompts greedily with those of ``--methods`` that it has and without: its
ratio is that to itself.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, add_drafters_flag, errors_end
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.speculative_config import METHODS, NETWORK_METHODS, SpeculativeConfig
from compiled_llm.bench.harness import TORCH_DTYPES, Row, finish, in_turns, median_ratio
from compiled_llm.bench.peers.engines import json_object
from compiled_llm.bench.peers.processes import PeerFailed, Worker, vllm_workers
from compiled_llm.bench.widening import Widening
from compiled_llm.bench.workloads import Requests, WorkloadRequest
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.checkpoint.shapes import SHAPES, config_of, engine_parser
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.sampling import SamplingInput, sample
from compiled_llm.system.resources import granted_cores
from compiled_llm.worker.device import resolve_device

_FUNCTION = """def read_{0}(path, separator):
    with open(path) as file:
        {0} = [line.split(separator) for line in file]
    return [{1} for {1} in {0} if len({1}) > {2}]


def write_{0}(path, {0}, separator):
    with open(path, "w") as file:
        for {1} in {0}:
            file.write(separator.join({1}))


"""
_NAMES = ("rows", "row"), ("items", "item"), ("users", "user"), ("points", "point"), ("words", "word")
_PLAIN, _PLAIN_AGAIN = "none", "none again"
# Every round serves the same prompts, so outputs of rounds before must not be drafted.
_CONFIGS = {"suffix": {"suffix_decoding_max_cached_requests": 0}}
_METHODS_OF_BOTH = ("ngram", "draft_model")  # that vLLM has too, by the same names
_VLLM_SECONDS = 900  # for a start and for a run
_TREE = " tree"  # behind the name of a method that drafts trees
_VLLM = "vllm "  # before the name of a method of vLLM's
_FIGURES = "tokens_per_second", "ratio", "accepted_share", "accepted_length", "draft_us"


def edit_prompts(count: int) -> list[str]:
    """Prompts that ask for code once more: a function twice, and the beginning of a third time."""
    prompts = []
    for number in range(count):
        plural, single = _NAMES[number % len(_NAMES)]
        text = _FUNCTION.format(plural, single, number)
        changed = text.replace("separator", "delimiter")
        prompts.append(
            f"{text}# The same with delimiter in the place of separator:\n{changed}# Once more:\n{text[:40]}"
        )
    return prompts


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "What speculation gives: tokens a second with each method and without.")
    add = made.add_argument
    add("--methods", nargs="+", default=["ngram", "suffix"], choices=tuple(METHODS), help="(default: ngram suffix)")
    add_drafters_flag(made)
    add(
        "--widen",
        choices=SHAPES,
        metavar="SHAPE",
        help="serve --model, its MTP layer and heads at the size of qwen3-0.6b, say",
    )
    add("--trees", action="store_true", help="also with speculative_token_tree auto, of methods that have it")
    add("--acceptance", action="store_true", help="of networks: beside what rejection sampling would accept")
    add("--batch-sizes", nargs="+", type=int, default=[1, 4, 16], help="requests at once (default: 1 4 16)")
    add("--temperatures", nargs="+", type=float, default=[0.0], help="(default: 0)")
    add("--num-tokens", type=int, default=128, help="of each output (default: 128)")
    add("--vllm-python", metavar="PATH", help="python of an environment with vLLM for CPUs, for its own ratios")
    add("--vllm-args", type=json_object, default={}, metavar="JSON", help="arguments of its LLM besides")
    add("--prompts", type=Path, help="a file with a prompt in each line, as a JSON string")
    add("--groups", type=int, default=1, help="of --batch-sizes prompts, served one after another (default: 1)")
    add("--rounds", type=int, default=5, help="(default: 5)")
    add("--processes", type=int, default=1, help="measure in so many processes, --rounds in each (default: 1)")
    tables.add_json_flag(made)
    return made


class Served:
    """An engine with one method, or with none, and what it served."""

    def __init__(self, engine: CompiledEngine) -> None:
        self.engine, self.tokens = engine, list[list[int]]()

    def run(self, groups: Sequence[Sequence[str]], params: SamplingParams) -> float:
        """Tokens a second of prompts, a group at a time."""
        started = time.perf_counter()
        found = [self.engine.generate(list(prompts), params, use_tqdm=False) for prompts in groups]
        seconds = time.perf_counter() - started
        self.tokens = [output.outputs[0].token_ids for outputs in found for output in outputs]
        return sum(map(len, self.tokens)) / seconds


def measure(
    engines: dict[str, Served], groups: Sequence[Sequence[str]], params: SamplingParams, rounds: int
) -> dict[str, Any]:
    """Of each engine: tokens a second, how many times as many as without, and how drafts fared.

    Raises:
        RuntimeError: a method changed a token.
    """
    before = {name: served.engine.stats() for name, served in engines.items()}
    runs = {name: functools.partial(served.run, groups, params) for name, served in engines.items()}
    found = in_turns(runs, rounds=rounds)
    results = {}
    for name, served in engines.items():
        if served.tokens != engines[_PLAIN].tokens:
            raise RuntimeError(f"{name} changed a token: please report it")
        stats = served.engine.stats().since(before[name])
        results[name] = {
            "tokens_per_second": statistics.median(found[name]),
            "ratio": median_ratio(found[name], found[_PLAIN]),
            "accepted_share": stats.num_accepted_draft_tokens / max(1, stats.num_draft_tokens),
            "accepted_length": stats.mean_accepted_length if stats.num_drafts else 1.0,
            "draft_us": 1e6 * stats.draft_seconds / max(1, stats.num_output_tokens),
        }
    return results


def method_config(name: str, drafters: Mapping[str, str], **fields: Any) -> dict[str, Any] | None:
    """``speculative_config`` of a method, or of one that drafts trees, or of none."""
    method = name.removesuffix(_TREE)
    if method in (_PLAIN, _PLAIN_AGAIN):
        return None
    config = {"method": method, **_CONFIGS.get(method, {}), **fields}
    if method in drafters:
        config["model"] = drafters[method]
    return config | ({"speculative_token_tree": "auto"} if name.endswith(_TREE) else {})


def acceptance(engine: CompiledEngine, prompts: Sequence[str], temperature: float, num_tokens: int) -> dict[str, Any]:
    """How often drafts of an uncompiled engine are right, and what rejection sampling would accept."""
    seen = DraftAcceptance(engine)
    engine.generate(
        list(prompts),
        [
            SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True)
            for seed in range(len(prompts))
        ],
        use_tqdm=False,
    )
    return {"drafts": seen.num_tried, "accepted": seen.rate, "optimum": seen.optimum}


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(
        _check, arguments, batch_sizes=1, num_tokens=2, groups=1, rounds=1, processes=1
    )
    accepted = list[Row]()
    with ExitStack() as stack, errors_end(program):
        if args.widen is not None:
            stack.enter_context(_widened(args))
        names = _names(args)
        rows = _measured_rows(program, args, names) if args.processes == 1 else _of_processes(program, args, names)
        print(tables.text_table([{name: value for name, value in row.items() if name != "ratios"} for row in rows]))
        if args.acceptance:
            accepted = _acceptance_rows(args)
    if accepted:
        print(tables.text_table(accepted))
    finish(
        "speculation", {"runs": _by_run(rows), "acceptance": accepted}, args.json, device=resolve_device(args.device)
    )
    return 0


def _names(args: argparse.Namespace) -> list[str]:
    """What is measured: methods, those that draft trees, and none."""
    trees = [name for name in args.methods if args.trees and "speculative_token_tree" in METHODS[name].fields]
    return [_PLAIN, *args.methods, *(name + _TREE for name in trees)]


def _measured_rows(program: str, args: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """A row of each number of requests, temperature and method. ``names``: methods, in the order of their engines."""
    rows = list[Row]()
    prompts = _prompts(args)
    with ExitStack() as stack:
        given = stack.enter_context(config_of(args, enable_prefix_caching=False))
        engines = {}
        for name in names:
            config = dataclasses.replace(given, speculative_config=method_config(name, dict(args.drafters)))
            engines[name] = Served(stack.enter_context(CompiledEngine.from_config(config)))
        for size in args.batch_sizes:
            for temperature in args.temperatures:
                params = SamplingParams(max_tokens=args.num_tokens, temperature=temperature, seed=1, ignore_eos=True)
                chosen = [prompts[index % len(prompts)] for index in range(size * args.groups)]
                groups = [chosen[start : start + size] for start in range(0, len(chosen), size)]
                found = measure(engines, groups, params, args.rounds)
                rows += [{"batch": size, "temperature": temperature, "method": n, **row} for n, row in found.items()]
        if args.vllm_python is not None:
            with errors_end(program, (PeerFailed,), status=1):
                rows += _of_vllm(args, engines[_PLAIN].engine, prompts)
    return rows


def _of_processes(program: str, args: argparse.Namespace, names: Sequence[str]) -> list[Row]:
    """The rows of several processes, joined."""
    names = [*names, _PLAIN_AGAIN]
    turns = [names[number % len(names) :] + names[: number % len(names)] for number in range(args.processes)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        found = list(pool.map(_measured_rows, *zip(*((program, args, turn) for turn in turns), strict=True)))
    return joined(found, names)


def joined(found: Iterable[Sequence[Row]], names: Sequence[str]) -> list[Row]:
    """A row for the rows of the same that several processes measured: medians, the lowest and the highest ratio.

    ``names``: methods, in the order of the rows of one temperature.
    """
    same = dict[tuple[int, float, int], list[Row]]()
    for row in itertools.chain.from_iterable(found):
        same.setdefault((row["batch"], row["temperature"], names.index(row["method"])), []).append(row)
    rows = []
    for _, group in sorted(same.items()):
        medians = {name: statistics.median(row[name] for row in group) for name in _FIGURES}
        ratios = [row["ratio"] for row in group]
        rows.append(group[0] | medians | {"lowest": min(ratios), "highest": max(ratios), "ratios": ratios})
    return rows


def _by_run(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows by the number of requests and the temperature, for the line of JSON."""
    runs = dict[str, dict[str, Row]]()
    for row in rows:
        of_whom = ", vLLM" if row["method"].startswith(_VLLM) else ""
        figures = {name: value for name, value in row.items() if name not in ("batch", "temperature", "method")}
        runs.setdefault(f"batch {row['batch']}{of_whom}, temperature {row['temperature']:g}", {})[row["method"]] = (
            figures
        )
    return runs


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts is None:
        return edit_prompts(args.groups * max(args.batch_sizes))
    return [json.loads(line) for line in args.prompts.read_text().splitlines()]


def _acceptance_rows(args: argparse.Namespace) -> list[Row]:
    """Of each method with a network: how often its drafts are right, beside rejection sampling's optimum."""
    rows, prompts = list[Row](), _prompts(args)
    with config_of(args, enable_prefix_caching=False) as given:
        for name in [name for name in args.methods if name in NETWORK_METHODS]:
            drafting = method_config(name, dict(args.drafters), adaptive=False)
            config = dataclasses.replace(given, speculative_config=drafting, enforce_eager=True)
            with CompiledEngine.from_config(config) as engine:
                for temperature in args.temperatures:
                    found = acceptance(engine, prompts, temperature, args.num_tokens)
                    rows.append({"temperature": temperature, "method": name, **found})
    return rows


@contextmanager
def _widened(args: argparse.Namespace) -> Iterator[None]:
    """Has the flags ``--model`` and ``--drafters`` name what ``--widen`` makes of these."""
    model = Path(args.model)
    widening = Widening(
        json.loads((model / "config.json").read_text()),
        SHAPES[args.widen],
        TORCH_DTYPES.get(args.dtype, torch.bfloat16),
    )
    with tempfile.TemporaryDirectory(prefix="compiled-llm-") as directory:
        made = {name: Path(directory, name) for name, _ in args.drafters if name != "draft_model"}
        for name, drafter in args.drafters:
            if name in made:
                widening.head(Path(drafter), made[name])
        args.model, args.drafters = (
            str(Path(directory, "model")),
            [(name, str(made.get(name, drafter))) for name, drafter in args.drafters],
        )
        widening.model(model, Path(args.model))
        yield


def _check(args: argparse.Namespace) -> None:
    if args.widen is not None and (args.model is None or not Path(args.model, "config.json").is_file()):
        raise ValueError(f"--model must be a checkpoint's directory with --widen, given {args.model}")
    if args.vllm_python is not None and args.model is None:
        raise ValueError("--model must be given with --vllm-python, which reads a checkpoint, not a shape's config")
    for name in ("processes", "groups") if args.vllm_python is not None else ():
        if getattr(args, name) > 1:
            raise ValueError(f"--{name} must be 1 with --vllm-python, given {getattr(args, name)}")


def _of_vllm(args: argparse.Namespace, engine: CompiledEngine, prompts: Sequence[str]) -> list[Row]:
    """Rows of the same greedy requests on vLLM."""
    tokenizer, config = engine.tokenizer, engine.config
    assert tokenizer is not None, "its prompts are texts"
    configs = dict[str, dict[str, Any]]()
    for name in [name for name in args.methods if name in _METHODS_OF_BOTH]:
        ours = SpeculativeConfig.of(method_config(name, dict(args.drafters)))
        fields = ("model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        configs[name] = {"method": name, **{f: getattr(ours, f) for f in fields if getattr(ours, f) is not None}}
    limits, dtype = engine.runner.limits, engine.model_config.dtype if config.dtype == "auto" else config.dtype
    plain: dict[str, Any] = {"max_model_len": limits.max_model_len, "dtype": dtype, **args.vllm_args}
    options = {_PLAIN: plain} | {name: {**plain, "speculative_config": one} for name, one in configs.items()}
    rows = list[Row]()
    model = checkpoint_directory(config)
    with vllm_workers(args.vllm_python, model, options, granted_cores(), None, _VLLM_SECONDS) as workers:
        for size in args.batch_sizes:
            tokens = [tokenizer.encode(prompts[index % len(prompts)]) for index in range(size)]
            found = _measured_vllm(workers, [WorkloadRequest(one, args.num_tokens) for one in tokens], args.rounds)
            rows += [{"batch": size, "temperature": 0.0, "method": name, **row} for name, row in found.items()]
    return rows


def _measured_vllm(workers: Mapping[str, Worker], requests: Requests, rounds: int) -> dict[str, dict[str, Any]]:
    """Of each worker: tokens a second of these requests, which are greedy, and how many times as many as without."""

    def run_of(worker: Worker) -> Any:
        return lambda: sum(output for _, output in requests) / worker.run(requests)["seconds"]

    found = in_turns({name: run_of(worker) for name, worker in workers.items()}, rounds=rounds)
    return {
        _VLLM + name: {"tokens_per_second": statistics.median(values), "ratio": median_ratio(values, found[_PLAIN])}
        for name, values in found.items()
    }


# ---- how often drafts are right -----------------------------------------------------------------------------------


class _Guess(NamedTuple):
    """The drafter's logits [V] of the token at a position, and how it is sampled: fields of one row."""

    logits: Tensor
    params: SamplingInput


class DraftAcceptance:
    """Looks on while an engine drafts with a network, in this process, uncompiled, on a CPU.

    Rejection sampling accepts a draft with the probability that the model's distribution p and the drafter's q share,
    the sum of min(p, q) over all tokens, and no rule that keeps p accepts more (Leviathan et al., 2023,
    arXiv:2211.17192). Here a draft is right if it is the token that the model samples with the same noise, which is
    less often. Both are counted of the drafts behind which all others of their step were right.

    Requests must have seeds of their own, a temperature, and nothing else that changes distributions.

    Attributes:
        num_tried, num_right: drafts.
        shared: the sum of the probability that p and q share at these.
    """

    def __init__(self, engine: CompiledEngine) -> None:
        runner = engine.own_runner
        assert runner.steps.drafting is not None
        self.num_tried = self.num_right = 0
        self.shared = 0.0
        self._store = runner.rows
        self._guesses: dict[tuple[int, int], _Guess] = {}  # by seed and position
        runner.watch = self._step
        runner.steps.drafting.watch(self._draft)

    @property
    def rate(self) -> float:
        """The share of drafts that were right."""
        return self.num_right / max(1, self.num_tried)

    @property
    def optimum(self) -> float:
        """The share that rejection sampling would accept."""
        return self.shared / max(1, self.num_tried)

    def _draft(self, logits: Tensor, params: SamplingInput) -> Tensor:
        for row, (seed, position) in enumerate(zip(params.seed.tolist(), params.position.tolist(), strict=True)):
            own = SamplingInput(*(field[row : row + 1].clone() for field in params))
            self._guesses[seed, position] = _Guess(logits[row].clone(), own)
        return sample(logits, params)

    def _step(self, output: SchedulerOutput, bucket: Bucket, run: Callable[[], Tensor]) -> Tensor:
        logits, end = run(), 0
        columns = output.request_ids, output.first_rows(), output.num_samples, output.num_computed_tokens
        for (name, first_row, num_samples, start), count in zip(
            zip(*columns, strict=True), output.num_scheduled_tokens, strict=True
        ):
            end += count
            seed = int(self._store.parameters["seed"][self._store.row_of(name)])
            drafts = output.token_ids[end - num_samples + 1 : end] if num_samples else ()
            for place, draft in enumerate(drafts):
                guess = self._guesses[seed, start + count - num_samples + 1 + place]
                row = logits[first_row + place][None]
                self.num_tried += 1
                self.shared += _shared(row, guess)
                if int(sample(row, guess.params)) != draft:
                    break
                self.num_right += 1
        return logits


def _shared(logits: Tensor, guess: _Guess) -> float:
    """The probability that the model's distribution, of ``logits`` [1, V], and the drafter's have in common."""
    temperature = float(guess.params.temperature)
    own = torch.full_like(logits[0], -torch.inf, dtype=torch.float32)  # a drafter may have fewer tokens
    own[: len(guess.logits)] = guess.logits.float()
    if temperature == 0:
        return float(logits[0].argmax() == own.argmax())
    p, q = ((row / temperature).softmax(-1) for row in (logits[0].float(), own))
    return float(torch.minimum(p, q).sum())
