"""Starts an engine on each model directory that stdin names, a line each, and says on stdout what came of it, as JSON.

A process of its own, so that a case may end it and its memory can be measured: ``VmHWM`` is set back before each.
"""

import contextlib
import json
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from compiled_llm import CompiledEngine, SamplingParams

SECONDS = 60  # after which a case counts as hanging


class Hangs(BaseException):
    """Not to be caught by the engine."""


def memory_bytes(field: str) -> int:
    """``VmRSS`` now, or ``VmHWM``, the most since it was set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def attempt(directory: Path) -> dict[str, Any]:
    """What comes of a start and two requests: an error's type and message, or why the requests ended."""
    try:
        with warnings.catch_warnings(), CompiledEngine(
            str(directory), enforce_eager=True, bucket_sizes=(1,), token_bucket_sizes=(16,), device="cpu"
        ) as engine:  # fmt: skip
            params = SamplingParams(max_tokens=1, temperature=0)
            prompts: list[Any] = [[1, 3, 4]] if engine.tokenizer is None else [[1, 3, 4], "a abc b <s>"]
            outputs = engine.generate(prompts, params, use_tqdm=False)
            return {"served": [[o.outputs[0].finish_reason, str(o.outputs[0].stop_reason)] for o in outputs]}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    except BaseException as error:
        return {"error": f"{type(error).__name__} (no Exception)", "message": str(error)}


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(Hangs()))
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        directory = Path(line.rstrip("\n"))
        Path("/proc/self/clear_refs").write_text("5")
        before, begun, worked = memory_bytes("VmRSS"), time.monotonic(), time.process_time()
        signal.alarm(SECONDS)
        with contextlib.redirect_stdout(sys.stderr):
            found = attempt(directory)
        signal.alarm(0)
        found["seconds"] = time.monotonic() - begun
        found["cpu_seconds"] = time.process_time() - worked
        found["bytes"] = memory_bytes("VmHWM") - before
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
