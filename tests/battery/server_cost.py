"""What the server costs: the same requests by ``generate`` and by ``serve``, in turns on the same machine.

    python -m tests.battery.server_cost --rounds 5
    python -m tests.battery.server_cost --model FILE.gguf --streams 1,8 --tokens 64

Both have an engine of the same arguments in a process of its own. So steps hold as many tokens of prompts in both:
``serve`` alone would keep them to 250 ms, as ``--engine-args '{"target_itl_ms": 250}'`` does in both. The client of the
server takes next to no time, since clients are on other machines as a rule: from the first event of a stream on it
sleeps until the server closes that.
A ratio of 1 is no cost; it is the median of the rounds, whose order changes. First events are compared with the first
tokens that ``generate`` has of the same prompts and steps, at the median: of a stream alone, and of all together.
``--save FILE`` adds a row for each number of streams to a file of JSON.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from compiled_llm.checkpoint.shapes import SHAPES, model_of

_GENERATE = """
import json, sys, time
from compiled_llm import CompiledEngine, SamplingParams
engine = CompiledEngine(**json.loads(sys.argv[1]))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    prompts, max_tokens = json.loads(line)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    started = time.monotonic()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - started
    firsts = [output.metrics.first_token_time - started for output in outputs]
    print(json.dumps([seconds, firsts, [output.outputs[0].token_ids for output in outputs]]), flush=True)
"""
_LAST = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_PROMPT_TOKENS = 32
_NUM_ALONE = 15  # single streams, of whose first events there is a median
_MOST_BYTES = 1 << 20  # of a stream


class Generator:
    """``generate`` in a process of its own."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        command = [sys.executable, "-c", _GENERATE, json.dumps(engine_args)]
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Seconds until all have ended, those to the first token of the median one, and the tokens."""
        assert self.process.stdin is not None
        print(json.dumps([prompts, max_tokens]), file=self.process.stdin, flush=True)
        seconds, firsts, token_ids = self._answer()
        return seconds, statistics.median(firsts), token_ids

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"generate ended with exit status {self.process.wait()}; see above")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()


class Server:
    """``serve`` with its processes."""

    def __init__(self, engine_args: dict[str, Any], flags: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        own = ["--port", str(self._port), *flags, *_flags(engine_args)]
        command = [sys.executable, "-m", "compiled_llm", "serve", *own]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"serve ended with exit status {self.process.returncode}: {' '.join(command)}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health")
                break
            time.sleep(0.1)
        children = psutil.Process(self.process.pid).children()
        (self.engine,) = (child for child in children if "compiled_llm.server.engine_process" in child.cmdline())

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, float, list[bytes]]:
        """Seconds until all streams have ended, those to the first event of the median one, and the streams."""
        started = time.perf_counter()
        selector, streams, firsts = selectors.DefaultSelector(), [bytearray() for _ in prompts], []
        with contextlib.ExitStack() as stack:
            for prompt, stream in zip(prompts, streams, strict=True):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", self._port)))
                connection.sendall(_request(prompt, max_tokens))
                selector.register(connection, selectors.EVENT_READ, stream)
            num_open = len(prompts)
            while num_open:
                for key, _ in selector.select():
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    assert data, f"the stream has broken off: {bytes(key.data[-500:])!r}"
                    if b"data: " not in key.data and b"data: " in data:
                        firsts.append(time.perf_counter() - started)
                        # The kernel wakes nobody for less than this, but at the end.
                        key.fileobj.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _MOST_BYTES)  # type: ignore[union-attr]
                    key.data.extend(data)
                    if key.data.endswith(_LAST):
                        selector.unregister(key.fileobj)
                        num_open -= 1
            seconds = time.perf_counter() - started
        return seconds, statistics.median(firsts), [bytes(stream) for stream in streams]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def _flags(engine_args: dict[str, Any]) -> Iterator[str]:
    """Of ``serve``, whose own default of ``target_itl_ms`` is none of the engine's."""
    for name, value in {"target_itl_ms": "none", **engine_args}.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        yield f"--{name.replace('_', '-')}={text}"
    yield "--wait-for-compile"


def _request(prompt: Sequence[int], max_tokens: int) -> bytes:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    content = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
        len(content),
        content,
    )


def _prompts(count: int, seed: int) -> list[list[int]]:
    return [[(seed * 7919 + i * 131 + j * 17) % 4000 + 10 for j in range(_PROMPT_TOKENS)] for i in range(count)]


def _processor_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", help="the bundled one without")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--flags", default="", help="more of serve's, with spaces between them")
    parser.add_argument("--save", type=Path, metavar="FILE")
    args = parser.parse_args()
    counts = [int(count) for count in args.streams.split(",")]
    model = contextlib.nullcontext({"model": args.model} if args.model else {})
    with model if args.shape is None else model_of(args) as named:
        engine_args = {**named, "bucket_sizes": counts, "progress": "off", **args.engine_args}
        generator, server = Generator(engine_args), Server(engine_args, args.flags.split())
        try:
            for count in counts:
                found = _compare(generator, server, count, args.tokens, args.rounds)
                if args.save is not None:
                    rows = json.loads(args.save.read_text()) if args.save.exists() else []
                    row = {"model": Path(args.model or args.shape or "demo").name, "streams": count, **found}
                    args.save.write_text("[\n" + ",\n".join(map(json.dumps, [*rows, row])) + "\n]\n")
        finally:
            server.close()
            generator.close()


def _compare(generator: Generator, server: Server, count: int, max_tokens: int, num_rounds: int) -> dict[str, Any]:
    processes = {"http": server.process.pid, "engine": server.engine.pid, "generate": generator.process.pid,
                 "client": os.getpid()}  # fmt: skip
    watched = [psutil.Process(pid) for pid in processes.values()]
    rounds, firsts, num_events = [], [], 0
    for seed in range(num_rounds + 1):  # the first is a warm-up
        if seed == 1:
            before = [_processor_seconds(process) for process in watched]
        prompts = _prompts(count, seed)
        if seed % 2:
            generated, first_token, _ = generator.run(prompts, max_tokens)
        served, first, streams = server.run(prompts, max_tokens)
        if not seed % 2:
            generated, first_token, _ = generator.run(prompts, max_tokens)
        if seed:
            rounds.append((generated, served))
            firsts.append(first - first_token)
            num_events += sum(stream.count(b"data: ") - 1 for stream in streams)
    tokens = count * max_tokens
    used = [(_processor_seconds(process) - start) / (num_rounds * tokens) for process, start in
            zip(watched, before, strict=True)]  # fmt: skip
    ratios = sorted(generated / served for generated, served in rounds)
    alone = []
    for seed in range(max(num_rounds, _NUM_ALONE)):
        prompts = _prompts(1, 1000 + seed)
        alone.append(server.run(prompts, 2)[1] - generator.run(prompts, 2)[1])
    generated, served = (tokens / min(column) for column in zip(*rounds, strict=True))
    print(
        f"{count} streams: generate {generated:.0f} tokens/s at best, serve {served:.0f}, ratio "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); first event of a stream alone "
        f"{1e3 * statistics.median(alone):.1f} ms later, of these {1e3 * statistics.median(firsts):.1f} ms; "
        f"{num_rounds * tokens / num_events:.1f} tokens an event; processor time of a token: "
        + ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in zip(processes, used, strict=True)),
        flush=True,
    )
    return {
        "tokens": max_tokens,
        "rounds": num_rounds,
        "ratio": round(statistics.median(ratios), 3),
        "least_ratio": round(ratios[0], 3),
        "most_ratio": round(ratios[-1], 3),
        "generate_tokens_per_second": round(generated, 1),
        "serve_tokens_per_second": round(served, 1),
        "first_event_later_ms": round(1e3 * statistics.median(alone), 2),
        "first_events_together_later_ms": round(1e3 * statistics.median(firsts), 1),
        "tokens_an_event": round(num_rounds * tokens / num_events, 2),
        "processor_us_a_token": {name: round(1e6 * seconds) for name, seconds in zip(processes, used, strict=True)},
        "torch": importlib.metadata.version("torch"),
    }


if __name__ == "__main__":
    main()
