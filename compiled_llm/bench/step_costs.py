"""What steps of an engine take on this machine, for ``compiled-llm plan --costs``.

    compiled-llm bench step-costs --model DIR --costs costs.json
    compiled-llm bench step-costs --replicas 2 --num-threads 1 --costs costs.json

Measured are steps that give each request a token, with the least, a middle and the largest number of requests of each
bucket, and steps with prompts alike; what contexts add is told by longer ones. With ``--replicas`` as many engines
measure at the same time, since they share the machine; a device of the file is what one of their ranks has. The times
are those of ``engine.step``, the host's included, means over ``--rounds``: a queue grows with slow steps as well. Then
random requests come one by one, and all times are scaled to what their steps take.

``--json FILE`` writes the last line there too.
"""

import contextlib
import dataclasses
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench.harness import finish
from compiled_llm.checkpoint.shapes import config_of, engine_parser
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.planning.costs import MeasuredCosts, Points, ReplicaCosts
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.system import hardware
from compiled_llm.system.resources import total_memory

_PROMPT, _STEPS = 16, 12  # tokens of a short prompt; steps of a measurement
_STEPS_IN_SERVICE = 100  # of a round
_LEAST_TOKENS = 128  # of a request: a prompt of 32, and all others' beside it


class Scales(NamedTuple):
    """What steps that only decode, and those with prompts, took, times what costs said."""

    decode: float
    chunk: float

    def of(self, costs: ReplicaCosts) -> ReplicaCosts:
        def scaled(points: Points, scale: float) -> Points:
            return tuple((size, seconds * (scale or 1)) for size, seconds in points)

        return dataclasses.replace(
            costs,
            decode=scaled(costs.decode, self.decode),
            chunk=scaled(costs.chunk, self.chunk),
            key_seconds=costs.key_seconds * (self.decode or 1),
            pair_seconds=costs.pair_seconds * (self.chunk or 1),
        )


class StepTimes:
    """What an engine's steps take beside what ``costs`` say, those that only decode and those with prompts apart.

    It sees what the engine launches from now on, until ``close``. What is done between two steps counts with the
    second, if the engine had work.
    """

    def __init__(self, engine: CompiledEngine, costs: ReplicaCosts) -> None:
        self.measured, self.expected = {"decode": 0.0, "chunk": 0.0}, {"decode": 0.0, "chunk": 0.0}
        self._engine, self._costs, self._launch = engine, costs, engine.runner.launch
        self._launched: list[SchedulerOutput] = []
        self._since: float | None = None  # when the engine had work first, after the step before
        engine.runner.launch = self._see  # type: ignore[method-assign]

    def _see(self, output: SchedulerOutput) -> Any:
        self._launched.append(output)
        return self._launch(output)

    def add_request(self, name: str, tokens: list[int], params: SamplingParams) -> None:
        self._since = self._since or time.perf_counter()
        self._engine.add_request(name, tokens, params)

    def step(self) -> list[RequestOutput]:
        """``engine.step``, timed."""
        given = self._engine.step()
        assert self._since is not None
        now = time.perf_counter()
        seconds, self._since = now - self._since, now if self._engine.has_unfinished_requests() else None
        for output in self._launched:
            kind, expected = self._expected(output)
            self.measured[kind] += seconds / len(self._launched)
            self.expected[kind] += expected
        self._launched.clear()
        return given

    def _expected(self, output: SchedulerOutput) -> tuple[str, float]:
        rows = keys = tokens = pairs = 0
        for done, count in zip(output.num_computed_tokens, output.num_scheduled_tokens, strict=True):
            if done and count == 1:
                rows, keys = rows + 1, keys + done + 1
            else:
                tokens, pairs = tokens + count, pairs + count * done + count * (count + 1) // 2
        return "chunk" if tokens else "decode", self._costs.step_seconds(rows, keys, tokens, pairs)

    def scales(self) -> Scales:
        return Scales(*(self.measured[kind] / (self.expected[kind] or 1) for kind in ("decode", "chunk")))

    def close(self) -> None:
        self._engine.runner.launch = self._launch  # type: ignore[method-assign]


class Engines:
    """Engines in processes of their own, which measure or serve when they are told to. Close them."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, config))
            process.start()
            other.close()
            self.connections.append(own)
            self._processes.append(process)
        try:
            for connection in self.connections:
                connection.recv()
        except EOFError:
            self.close()
            raise SystemExit("an engine did not start: see above") from None

    def measure(self, rounds: int) -> ReplicaCosts:
        """All at the same time; the mean of what they found."""
        for connection in self.connections:
            connection.send(rounds)
        found: list[ReplicaCosts] = [connection.recv() for connection in self.connections]
        return mean_of(found)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            process.join()


def mean_of(found: Sequence[ReplicaCosts]) -> ReplicaCosts:
    """Costs of one engine, measured several times."""

    def mean(points: Iterator[tuple[tuple[int, float], ...]]) -> tuple[tuple[int, float], ...]:
        return tuple((column[0][0], statistics.mean(s for _, s in column)) for column in zip(*points, strict=True))

    return dataclasses.replace(
        found[0],
        decode=mean(one.decode for one in found),
        chunk=mean(one.chunk for one in found),
        key_seconds=statistics.mean(one.key_seconds for one in found),
        pair_seconds=statistics.mean(one.pair_seconds for one in found),
    )


def _serve(connection: Connection, config: EngineConfig) -> None:
    """A message is how many rounds to measure, or the costs that a load is compared with."""
    rng = np.random.default_rng(0)  # one for all: no prompt begins like another
    with CompiledEngine.from_config(config) as engine, contextlib.suppress(EOFError):
        measure(engine, 1, rng)
        connection.send("ready")
        while True:
            message = connection.recv()
            if isinstance(message, int):
                connection.send(measure(engine, message, rng))
            else:
                with contextlib.closing(StepTimes(engine, message)) as times:
                    _serve_load(connection, engine, times, rng)


def _serve_load(connection: Connection, engine: CompiledEngine, times: StepTimes, rng: np.random.Generator) -> None:
    """Serve (index, prompt tokens, output tokens) as they come, until None.

    Sends (index, time, whether it is the first token, whether it is the last) and, when all have ended, ``Scales``.
    """
    is_open, begun = True, set[str]()
    while is_open or engine.has_unfinished_requests():
        while is_open and (connection.poll(0) or not engine.has_unfinished_requests()):
            message = connection.recv()
            if message is None:
                is_open = False
                continue
            index, prompt, output = message
            times.add_request(f"{index}", _tokens(engine, rng, prompt), _params(output))
        for done in times.step() if engine.has_unfinished_requests() else ():
            is_first = done.request_id not in begun
            begun.add(done.request_id)
            if is_first or done.finished:
                connection.send((int(done.request_id), time.monotonic(), is_first, done.finished))
    connection.send(times.scales())


def _tokens(engine: CompiledEngine, rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(1, engine.model_config.vocab_size, count).tolist()


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def measure(engine: CompiledEngine, rounds: int, rng: np.random.Generator) -> ReplicaCosts:
    """The costs of an idle engine's steps."""
    limits, config = engine.runner.limits, engine.config
    longest, kv_tokens = limits.max_model_len - 1, engine.stats().num_kv_blocks * limits.block_size
    most_beside_decodes = limits.max_tokens_beside_decodes or limits.max_num_batched_tokens
    rows = [size for size in _points(limits.decode_bucket_sizes) if size <= limits.max_num_seqs]
    sizes = [size for size in _points(limits.token_bucket_sizes) if size <= limits.max_num_batched_tokens]

    def served(lengths: Sequence[int], outputs: int) -> list[tuple[float, int]]:
        """Of each step that serves random prompts of these lengths: its seconds, and how many requests got a token."""
        for number, length in enumerate(lengths):
            engine.add_request(f"{number}", _tokens(engine, rng, length), _params(outputs))
        found = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            num_tokens = len(engine.step())
            found.append((time.perf_counter() - start, num_tokens))
        return found

    def decode(count: int, prompt: int) -> float:
        """A step of ``count`` requests that all had a token in the step before, so none still has a prompt."""
        until_all_run = -(-count * prompt // most_beside_decodes) + 1
        found = served([prompt] * count, until_all_run + _STEPS)
        whole = [after for (_, before), (after, now) in itertools.pairwise(found) if before == now == count]
        return statistics.mean(whole[1:-1])

    def chunk(tokens: int, most: int) -> float:
        """A step of ``tokens`` in prompts of up to ``most``."""
        parts = -(-tokens // most)
        return served([tokens // parts + (n < tokens % parts) for n in range(parts)], 1)[0][0]

    most_tokens, room = sizes[-1], min(limits.max_model_len, kv_tokens // rows[-1])
    if room < _LEAST_TOKENS:
        raise ValueError(
            f"max_model_len, and the KV pool for each of {rows[-1]} requests, must be at least {_LEAST_TOKENS} tokens "
            f"to measure steps, given {limits.max_model_len} and {kv_tokens // rows[-1]}"
        )
    half = max(2 * _PROMPT, min(most_tokens, room - 1) // 4)
    decodes, chunks, keys, pairs = [], [], [], []
    for _ in range(rounds):
        decodes.append([decode(count, _PROMPT) for count in rows])
        chunks.append([chunk(tokens, half) for tokens in sizes])
        count = rows[-1]
        keys.append((decode(count, half) - decode(count, _PROMPT)) / (count * (half - _PROMPT)))
        parts, whole = -(-most_tokens // half), -(-most_tokens // longest)
        between = most_tokens**2 / 2 * (1 / whole - 1 / parts)
        pairs.append((chunk(most_tokens, longest) - chunk(most_tokens, half)) / between)
    key_seconds, pair_seconds = (max(0.0, statistics.mean(each)) for each in (keys, pairs))

    def without(found: list[list[float]], sizes: Sequence[int], per: Any) -> tuple[tuple[int, float], ...]:
        """Means, what contexts took left out, never falling."""
        means = [statistics.mean(each) - per(size) for size, each in zip(sizes, zip(*found, strict=True), strict=True)]
        return tuple(zip(sizes, itertools.accumulate(means, max), strict=True))

    ledger, ranks = engine.memory_report(), config.tensor_parallel_size
    costs = ReplicaCosts(
        tp=ranks,
        pp=1,
        decode=without(decodes, rows, lambda count: key_seconds * count * (_PROMPT + _STEPS / 2)),
        chunk=without(chunks, sizes, lambda tokens: pair_seconds * tokens**2 / 2 / -(-tokens // half)),
        key_seconds=key_seconds,
        pair_seconds=pair_seconds,
        weight_bytes=ledger.bytes_of("weights") / ranks,
        kv_bytes=ledger.bytes_of("KV pool") / kv_tokens / ranks,
        max_num_seqs=limits.max_num_seqs,
        max_tokens=limits.max_num_batched_tokens,
        max_tokens_beside_decodes=most_beside_decodes,
        kv_tokens=kv_tokens,
    )
    return _in_service(engine, costs, rounds * _STEPS_IN_SERVICE, rng)


def _in_service(engine: CompiledEngine, costs: ReplicaCosts, num_steps: int, rng: np.random.Generator) -> ReplicaCosts:
    """``costs`` in proportion to what steps of random requests take, which come one by one.

    Steps that are alike find their code and weights in the processor's caches, and nothing is done between them.
    """
    longest = max(2, min(engine.runner.limits.max_model_len, costs.max_tokens_beside_decodes) // 2)
    most, outputs, running = min(8, costs.max_num_seqs), min(48, longest), 0
    with contextlib.closing(StepTimes(engine, costs)) as times:
        for step in range(num_steps):
            if running < most and (not running or rng.random() < most / outputs):
                tokens = _tokens(engine, rng, int(rng.integers(1, longest)))
                times.add_request(f"{step}", tokens, _params(int(rng.integers(1, outputs + 1))))
                running += 1
            running -= sum(output.finished for output in times.step())
        while engine.has_unfinished_requests():
            times.step()
    return times.scales().of(costs)


def _points(buckets: Sequence[int]) -> list[int]:
    """The first, the middle and the last size of each bucket: a kernel takes rows by fours, say."""
    firsts = [1, *(size + 1 for size in buckets[:-1])]
    return sorted(
        {size for first, last in zip(firsts, buckets, strict=True) for size in (first, (first + last) // 2, last)}
    )


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "What steps of an engine take on this machine, for compiled-llm plan.")
    made.add_argument("--costs", type=tables.output_file, metavar="FILE", required=True, help="to write")
    made.add_argument("--replicas", type=int, default=1, help="engines that measure at the same time (default: 1)")
    made.add_argument("--rounds", type=int, default=5, help="of all measurements (default: 5)")
    tables.add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(None, arguments, replicas=1, rounds=1)
    with config_of(args) as config, contextlib.closing(Engines(config, args.replicas)) as engines:
        costs = engines.measure(args.rounds)
    name = Path(args.model).name if args.model else args.shape
    devices, machine = args.replicas * costs.tp, hardware.describe(torch.device("cpu"))
    MeasuredCosts([(name, costs)], machine["cpu"], total_memory() / devices).write(args.costs)
    rows = [{"step": f"{count} tokens", "ms": seconds * 1e3} for count, seconds in costs.decode]
    rows += [{"step": f"prompts of {tokens}", "ms": seconds * 1e3} for tokens, seconds in costs.chunk]
    print(tables.text_table(rows))
    finish("step_costs", {"model": name, "replicas": args.replicas, "costs": dataclasses.asdict(costs)}, args.json)
    return 0
