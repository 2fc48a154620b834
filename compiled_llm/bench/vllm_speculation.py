"""vLLM's own gain by speculation, for ``bench speculation``: with each of its methods and without, processes in turns.

Each is a process of ``peers/processes.py``, stopped while others are measured. They start at the same time, since a
start takes minutes.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from compiled_llm.bench.harness import in_turns, median_ratio
from compiled_llm.bench.peers.processes import Worker, vllm
from compiled_llm.bench.workloads import Requests, WorkloadRequest
from compiled_llm.system.resources import granted_cores

METHODS = ("ngram", "draft_model")  # that both have, by the same names
_SECONDS = 900  # for a start and for a run
_PLAIN = "none"


class VllmSpeculation:
    """vLLM without speculation and with each of ``methods``, its greedy output alone.

    Args:
        python: of an environment with vLLM for CPUs.
        configs: ``speculative_config`` by method, those of ``METHODS`` as this engine has them.
        options: arguments of vLLM's ``LLM`` besides.

    Raises:
        PeerFailed: one of them does not start.
    """

    def __init__(
        self, python: str, model: Path, configs: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
    ) -> None:
        self._stack = ExitStack()
        given: dict[str, dict[str, Any]] = {_PLAIN: {}}
        given |= {name: {"speculative_config": dict(config)} for name, config in configs.items()}
        try:
            logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-")))
            with ThreadPoolExecutor(len(given)) as threads:
                started = {
                    name: threads.submit(
                        Worker,
                        vllm(python, model, {**options, **more}, granted_cores(), None),
                        logs / f"{name}.log",
                        _SECONDS,
                    )
                    for name, more in given.items()
                }
            self._workers: dict[str, Worker] = {}
            for name, future in started.items():
                if future.exception() is None:
                    self._stack.callback(future.result().close)
            self._workers = {name: future.result() for name, future in started.items()}
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure(self, prompts: Sequence[Sequence[int]], num_tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
        """Of each: tokens a second of ``num_tokens`` greedy ones after each prompt, and how many times as without."""
        requests: Requests = [WorkloadRequest(list(prompt), num_tokens) for prompt in prompts]

        def run_of(worker: Worker) -> Any:
            return lambda: sum(output for _, output in requests) / worker.run(requests)["seconds"]

        found = in_turns({name: run_of(worker) for name, worker in self._workers.items()}, rounds=rounds)
        return {
            f"vllm {name}": {
                "tokens_per_second": statistics.median(values),
                "ratio": median_ratio(values, found[_PLAIN]),
            }
            for name, values in found.items()
        }
