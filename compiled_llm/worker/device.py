"""The device that an engine runs on, found and checked."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from compiled_llm.api.config import StepDefaults
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.rounding import ROUGH, rounding_of
from compiled_llm.ops.attention import kv_quant
from compiled_llm.system.gpu_packages import check_triton
from compiled_llm.system.progress import StartProgress
from compiled_llm.system.resources import granted_cores

# By device. A CPU compiles one graph for all sizes, a GPU one for each.
STEP_DEFAULTS = {
    "cpu": StepDefaults(
        batched_tokens=2048,
        beside_decodes=512,
        decode_buckets=(1, 8, 32),
        token_buckets=tuple(2**-n for n in range(7)),
    ),
    "cuda": StepDefaults(
        batched_tokens=2048,
        beside_decodes=2048,
        decode_buckets=tuple(2**n for n in range(9)),
        token_buckets=(1, *(n / 2**k for k in (2, 3, 4, 5) for n in (3, 2))),
    ),
}


def resolve_device(name: str) -> torch.device:
    """The torch device of an engine argument. ``ValueError`` when it is not there, or lacks the package it needs."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', given {name!r}") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device={name!r} is not there: torch sees {count} CUDA devices. Allowed: 'cpu', 'auto'")
        check_triton(f"device={name!r}")
        return torch.device("cuda", device.index or 0)
    return device


def use_device(device: torch.device, cache_dtypes: Sequence[torch.dtype], model_config: ModelConfig) -> None:
    """Make a GPU torch's current device, to which streams and events belong. Nothing to do for a CPU.

    Raises:
        ValueError: the GPU cannot serve one of ``cache_dtypes``, or a layer of the model.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        capability = torch.cuda.get_device_capability(device)
        for dtype in cache_dtypes:
            kv_quant.check_capability(dtype, capability)


def say_cost_of_dtype(progress: StartProgress, device: torch.device, dtype: torch.dtype, asked: str) -> None:
    """A line for users if ``dtype`` is slow on this device. ``asked``: the engine argument."""
    if device.type == "cuda" and dtype == torch.float32:
        name = "dtype='float32'" if asked == "float32" else f"dtype={asked!r}, which is float32 for this checkpoint,"
        progress.line(
            f"{name} takes twice the bytes of bfloat16, and leaves the GPU's matrix units for 16 bits unused (products "
            "on an H200: 25 TFLOP/s, up to 796 in bfloat16). Give dtype='bfloat16' unless you need float32"
        )


def say_cost_of_rounding(progress: StartProgress, linears: LinearKind, asked: str | None) -> None:
    """A line for users if weights are roughly rounded. ``asked``: the engine argument ``quantization``."""
    rounding = rounding_of(linears)
    if rounding is not None and rounding.error >= ROUGH:
        progress.line(
            f"quantization={asked!r} rounds this model's weights roughly: they change by {rounding}. `compiled-llm "
            "report weights` says what that costs; nearer are quantization='int8', a checkpoint that was calibrated on "
            "a text (`compiled-llm quantize --method gptq`), and layers left with quantization_skip"
        )


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Within it a GPU is torch's current device. Nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def choose_threads(num_threads: int | None) -> int:
    """Threads that compute on a CPU, as the engine argument ``num_threads`` asks for.

    Raises:
        ValueError: more than the cores that this process may use.
    """
    cores = granted_cores()
    if num_threads is None:
        return min(torch.get_num_threads(), cores)
    if num_threads > cores:
        raise ValueError(
            f"num_threads must be at most {cores}, the cores that this process may use (its affinity and its "
            f"container's quota), given {num_threads}: more would wait for one another"
        )
    return num_threads


def use_threads(count: int) -> int:
    """Have ops that this thread calls from now on run on ``count`` threads, until ``own_settings`` ends."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count
