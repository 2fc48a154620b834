"""How much of its speed an engine keeps on a machine that others use too: beside busy loops, and beside another engine.

    compiled-llm bench shared --model compiled_llm/demo_model
    compiled-llm bench shared --dtype bfloat16

One stream decodes, in a process of its own: alone, beside one and two programs in Python that do nothing but loop, and
beside a second engine that decodes the same. Each round measures all of them, ``--seconds`` each. A share is the speed
divided by that alone in the same round; of two engines it is the slower one's. Shown are medians over the rounds. With
as many cores as programs nobody has to share.

The environment counts: OMP_WAIT_POLICY and GOMP_SPINCOUNT should be unset, as they are for a user. ``--json FILE`` also
writes the last line there.
"""

import contextlib
import functools
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench.harness import finish, in_turns
from compiled_llm.checkpoint.shapes import config_of, engine_parser
from compiled_llm.engine.engine import CompiledEngine

SIZES = {"max_model_len": 1024, "bucket_sizes": (1,), "token_bucket_sizes": (128,)}
PROMPT = list(range(100, 228))
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


class Stream:
    """An engine in a process of its own, which decodes one request after the other while it is told to.

    Attributes:
        dtype: its weights' and activations', as "bfloat16".
    """

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, config), daemon=True)
        self._process.start()
        other_end.close()
        try:
            self.dtype: str = self._connection.recv()
        except EOFError:
            raise SystemExit(f"an engine did not start: its process ended with {self._process.exitcode}") from None

    def begin(self, seconds: float) -> None:
        self._connection.send(seconds)

    def result(self) -> dict[str, float]:
        """Of what was begun: ``tokens_per_second``, and ``cores``, the processor time taken per second."""
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, config: EngineConfig) -> None:
    with CompiledEngine.from_config(config) as engine:
        decode(engine, 0.2)
        connection.send(str(engine.runner.dtype)[6:])
        with contextlib.suppress(EOFError):
            while True:
                connection.send(decode(engine, connection.recv()))


def decode(engine: CompiledEngine, seconds: float) -> dict[str, float]:
    """One stream for ``seconds``, prompts left out of both tokens and time."""
    params = SamplingParams(temperature=0, max_tokens=engine.runner.limits.max_model_len - len(PROMPT), ignore_eos=True)
    tokens, spent, processor = 0, 0.0, 0.0
    while spent < seconds:
        engine.add_request("stream", PROMPT, params)
        engine.step()
        wall, used = time.perf_counter(), time.process_time()
        while engine.has_unfinished_requests() and spent + time.perf_counter() - wall < seconds:
            engine.step()
            tokens += 1
        spent, processor = spent + time.perf_counter() - wall, processor + time.process_time() - used
        if engine.has_unfinished_requests():
            engine.abort("stream")
            while engine.has_unfinished_requests():
                engine.step()
    return {"tokens_per_second": tokens / spent, "cores": processor / spent}


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """``count`` programs that keep a core busy each."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)  # they have started, and the scheduler has placed them
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def together(streams: Sequence[Stream], seconds: float, loops: int = 0) -> list[dict[str, float]]:
    """The result of each engine, which run at the same time, beside so many busy loops."""
    with busy_loops(loops):
        for stream in streams:
            stream.begin(seconds)
        return [stream.result() for stream in streams]


def compared(rounds: dict[str, list[list[dict[str, float]]]]) -> dict[str, dict[str, float]]:
    """Condition -> medians of ``tokens_per_second``, ``cores`` and ``share``, of the slower engine."""
    rows = {}
    for name, found in rounds.items():
        slower = [min(engines, key=lambda one: one["tokens_per_second"]) for engines in found]
        pairs = zip(slower, rounds["alone"], strict=True)
        shares = [one["tokens_per_second"] / alone["tokens_per_second"] for one, (alone,) in pairs]
        medians = {key: statistics.median(one[key] for one in slower) for key in slower[0]}
        rows[name] = medians | {"share": statistics.median(shares), "least_share": min(shares)}
    return rows


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "How much of its speed an engine keeps on a machine that others use too.")
    made.set_defaults(**SIZES)
    made.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default: 4)")
    made.add_argument("--rounds", type=int, default=5, help="of all measurements (default: 5)")
    tables.add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(None, arguments, seconds=0.1, rounds=1)
    with config_of(args) as config, contextlib.ExitStack() as at_the_end:
        streams = [at_the_end.enter_context(contextlib.closing(Stream(config))) for _ in range(2)]
        one, both = functools.partial(together, streams[:1]), functools.partial(together, streams)
        conditions = {
            "alone": lambda: one(args.seconds),
            "one busy loop": lambda: one(args.seconds, 1),
            "two busy loops": lambda: one(args.seconds, 2),
            "two engines": lambda: both(args.seconds),
        }
        rounds = in_turns(conditions, rounds=args.rounds, warm_up=0)
    rows, name = compared(rounds), args.model or args.shape
    print(f"{name}, {streams[0].dtype}")
    print(tables.text_table([{"one stream": name} | row for name, row in rows.items()]))
    result: dict[str, Any] = {"model": name, "dtype": streams[0].dtype, "seconds": args.seconds}
    result["environment"] = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    finish("shared", result | {"rows": rows, "rounds": rounds}, args.json)
    return 0
