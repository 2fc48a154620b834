"""Two engines with a role each beside one with all cores: long prompts that come in bursts beside steady decodes.

    compiled-llm bench roles --shape smollm2-135m --dtype bfloat16 --input-len 4096

"one" is an engine with all cores; "roles" are ``--decode-replicas`` that decode and ``--prefill-replicas`` that compute
prompts, on as many cores together. Both get the same load: ``--streams`` outputs that go on all the time, and
``--num-bursts`` times ``--burst`` prompts of ``--input-len`` tokens, ``--seconds`` from one burst to the next, whatever
is still under way. Tokens that nobody knows, no HTTP. A round ends when the last prompt is answered, at the earliest
``--seconds`` after the last burst came.

ITL is the time between two tokens of the steady outputs; TTFT that from a prompt's arrival to its first token; tokens/s
are those of prompts and outputs together, by the time of the round. Shown are medians over rounds, and of the ratios
within a round: above 1 the roles are ahead. Besides, for roles, how long it takes from the end of a prompt in the
engine that computes it to the first token of the one that answers.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.config import EngineConfig
from compiled_llm.bench.harness import finish, median_ratio
from compiled_llm.checkpoint.shapes import config_of, engine_parser
from compiled_llm.server.messages import Generate, Output
from compiled_llm.server.replicas import Replicas, engine_clients
from compiled_llm.server.settings import ServerSettings

_FOREVER = 10**9  # seconds
# Figure -> its title, and whether more is better.
FIGURES = {
    "itl_p50_ms": ("ITL p50 ms", False),
    "itl_p99_ms": ("ITL p99 ms", False),
    "itl_max_ms": ("ITL most ms", False),
    "ttft_p50_ms": ("TTFT p50 ms", False),
    "tokens_per_second": ("tokens/s", True),
}


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Two engines with a role each beside one: long prompts beside steady decodes.")
    add = made.add_argument
    add("--decode-replicas", type=int, default=1, help="(default: 1)")
    add("--prefill-replicas", type=int, default=1, help="(default: 1)")
    add("--input-len", type=int, default=4096, help="tokens of a long prompt (default: 4096)")
    add("--output-len", type=int, default=8, help="tokens of its output (default: 8)")
    add("--streams", type=int, default=4, help="steady outputs (default: 4)")
    add("--stream-len", type=int, default=1024, help="tokens of each, after which another one begins (default: 1024)")
    add("--burst", type=int, default=2, help="prompts at once (default: 2)")
    add("--num-bursts", type=int, default=2, help="(default: 2)")
    add("--seconds", type=float, default=45.0, help="from one burst to the next (default: 45)")
    add("--rounds", type=int, default=1, help="(default: 1)")
    tables.add_json_flag(made)
    return made


class Load:
    """The load on one server without HTTP.

    Attributes:
        gaps: seconds between two tokens of steady outputs.
        first: seconds to the first tokens of long prompts; after_prompt: of these, those after the prompt was computed
            by another engine.
        num_tokens: of prompts that were answered, and of outputs.
    """

    def __init__(self, replicas: Replicas, args: argparse.Namespace, vocab_size: int) -> None:
        self._replicas, self._args, self._vocab_size = replicas, args, vocab_size
        self._rng, self._names = random.Random(0), itertools.count()
        self._ended: dict[str, float] = {}  # request -> when its prompt was computed
        replicas.on_prompt = self._note_prompt
        self.start()

    def _note_prompt(self, request_id: str, output: Output) -> None:
        if output.times is not None and output.times.decode is not None:
            self._ended[request_id] = output.times.first or 0.0

    def start(self) -> None:
        """Count from now on."""
        self.gaps: list[float] = []
        self.first: list[float] = []
        self.after_prompt: list[float] = []
        self.num_tokens = 0

    async def _serve(self, length: int, num_tokens: int, *, is_steady: bool) -> None:
        """One request; what comes of it is counted."""
        tokens = [self._rng.randrange(3, self._vocab_size) for _ in range(length)]
        sampling = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False,
                    "output_kind": "delta"}  # fmt: skip
        request = Generate(f"bench-{next(self._names)}", tokens, sampling)
        began, last, first = time.perf_counter(), 0.0, 0.0
        outputs = self._replicas.generate([request], asyncio.get_running_loop().time() + _FOREVER)
        async with contextlib.aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                now, count = time.perf_counter(), sum(len(piece.token_ids) for piece in output.pieces)
                if output.error is not None:
                    raise RuntimeError(output.error)
                if not count:
                    continue
                self.num_tokens += count
                if last and is_steady:
                    self.gaps += [(now - last) / count] * count
                elif not last:
                    self.num_tokens += length
                    first = now - began
                    self.first += [] if is_steady else [first]
                last = now
        if request.request_id in self._ended:
            self.after_prompt.append(first - self._ended.pop(request.request_id))

    async def _stream(self) -> None:
        while True:
            await self._serve(16, self._args.stream_len, is_steady=True)

    async def run(self, num_bursts: int, burst: int, seconds: float) -> dict[str, float]:
        """A round. Returns its figures."""
        args = self._args
        streams = [asyncio.create_task(self._stream()) for _ in range(args.streams)]
        await asyncio.sleep(1.0)
        self.start()
        began, prompts = time.perf_counter(), list[asyncio.Task[None]]()
        for _ in range(num_bursts):
            await asyncio.sleep(1.0)
            one = (self._serve(args.input_len, args.output_len, is_steady=False) for _ in range(burst))
            prompts += map(asyncio.create_task, one)
            await asyncio.sleep(max(0.0, seconds - 1.0))
        await asyncio.gather(*prompts)
        elapsed = time.perf_counter() - began
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        ordered = sorted(self.gaps)
        return {
            "itl_p50_ms": 1000 * statistics.median(ordered),
            "itl_p99_ms": 1000 * ordered[int(0.99 * len(ordered))],
            "itl_max_ms": 1000 * ordered[-1],
            "ttft_p50_ms": 1000 * statistics.median(self.first),
            "tokens_per_second": self.num_tokens / elapsed,
            "after_prompt_ms": 1000 * statistics.median(self.after_prompt or [0.0]),
        }


async def measured(
    config: EngineConfig, settings: ServerSettings, args: argparse.Namespace
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Figures of each round, and what each engine counted."""
    replicas = Replicas(engine_clients(config, settings), settings)
    await replicas.start()
    try:
        started = await replicas.ready()
        load = Load(replicas, args, started.vocab_size)
        await load.run(1, 1, 1.0)  # what is done once is done then
        rounds = [await load.run(args.num_bursts, args.burst, args.seconds) for _ in range(args.rounds)]
        counts = [{**(await client.stats()), **replicas.counts} for client in replicas.clients]
    finally:
        await replicas.close()
    return rounds, counts


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"decode_replicas": 1, "prefill_replicas": 1, "input_len": 256, "output_len": 1, "streams": 1, "burst": 1,
             "num_bursts": 1, "rounds": 1, "stream_len": 16, "seconds": 1}  # fmt: skip
    args = parser(program).parse_checked(None, arguments, **least)
    with errors_end(program), config_of(args) as given:
        size = given.block_size
        blocks = (args.burst + 2) * -(-(args.input_len + args.output_len) // size)
        blocks += args.streams * -(-(args.stream_len + 32) // size)
        length = max(args.input_len + args.output_len, args.stream_len + 16)
        config = dataclasses.replace(given, num_kv_blocks=blocks, max_model_len=length)
        apart = {"data_parallel_size": args.decode_replicas, "prefill_replicas": args.prefill_replicas}
        ways = {"one": ServerSettings(), "roles": ServerSettings(**apart, max_prefill_seconds=3600.0)}
        found = {name: asyncio.run(measured(config, settings, args)) for name, settings in ways.items()}
    rows = []
    for key, (title, more_is_better) in FIGURES.items():
        one, roles = ([figures[key] for figures in found[name][0]] for name in ways)
        above, below = (roles, one) if more_is_better else (one, roles)
        medians = {"one": statistics.median(one), "roles": statistics.median(roles)}
        rows.append({"figure": title, **medians, "ratio": median_ratio(above, below)})
    print(tables.text_table(rows))
    names = ("peer_hit_tokens", "peer_taken_bytes", "num_takes_failed", "tier_file_seconds", "tier_idle_seconds")
    engines = [{name: counts[name] for name in names} for counts in found["roles"][1]]
    print("; ".join(f"engine {number}: {counts}" for number, counts in enumerate(engines)))
    prompts = {name: found["roles"][1][0][name] for name in ("prompts_apart", "prompts_back")}
    prompts["after_prompt_ms"] = statistics.median(figures["after_prompt_ms"] for figures in found["roles"][0])
    print(f"from the end of a prompt to its first token: {prompts['after_prompt_ms']:.0f} ms")
    finish("roles", {"input_len": args.input_len, "rows": rows, "engines": engines, **prompts}, args.json)
    return 0
