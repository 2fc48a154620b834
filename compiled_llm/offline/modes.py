"""Modes by name: sizes that go together, for short answer times or for many tokens a second.

A mode sets sizes alone, so it changes no result. What rounds weights or the KV cache is asked for by name.
"""

from collections.abc import Mapping
from typing import Any, Literal

MODES = ("low-latency", "balanced", "high-throughput", "throughput-offload")

# By mode and device. The sizes of a GPU follow from how its steps are recorded, and were not measured on one.
_SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "low-latency": {
        "cpu": {"bucket_sizes": (1, 2, 4, 8), "max_num_batched_tokens": 256},
        "cuda": {"bucket_sizes": (1, 2, 4, 8, 16), "max_num_batched_tokens": 512},
    },
    "balanced": {"cpu": {}, "cuda": {}},
    "high-throughput": {
        "cpu": {"bucket_sizes": (1, 8, 32, 64, 128), "max_num_batched_tokens": 2048},
        "cuda": {"bucket_sizes": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "max_num_batched_tokens": 8192},
    },
    # A step reads each layer from disk once, whatever its size: as many tokens as the KV pool allows share that.
    "throughput-offload": {"cpu": {"bucket_sizes": (1, 32, 128, 512), "max_num_batched_tokens": 8192}},
}
# What makes the steps of most models faster and changes results a little: named to the user, and never set by a mode.
_FASTER_FLAGS = {"quantization": "int8_w8a8", "kv_cache_dtype": "int8"}


def mode_arguments(mode: str, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """The engine arguments that a mode stands for; none for "balanced", which is the engine's defaults.

    Args:
        mode: "low-latency": few requests at once and small steps, so that each token comes soon; "high-throughput":
            many requests at once and large steps; "throughput-offload": the largest ones, for weights on a disk
            (``weights_path``) that memory has no room for; "balanced": in between.
        device: what the engine runs on.

    Raises:
        ValueError: the mode is not for this device.
    """
    if device not in _SIZES[mode]:
        raise ValueError(
            f"--mode must be another on a GPU, given {mode}: weights are read from disk for steps of a CPU alone "
            "(--device cpu)"
        )
    return dict(_SIZES[mode][device])


def faster_but_rounded(mode: str, given: Mapping[str, Any]) -> str:
    """A line that names the flags which trade accuracy for more of what ``mode`` is for; empty where there are none.

    Args:
        given: engine arguments; a flag is not named if its argument rounds already.
    """
    defaults = {"quantization": None, "kv_cache_dtype": "auto"}
    left = {name: value for name, value in _FASTER_FLAGS.items() if given[name] == defaults[name]}
    if mode == "balanced" or not left:
        return ""
    return f"{as_flags(left)} may be faster still with a large model, and changes the results a little"


def as_flags(arguments: Mapping[str, Any]) -> str:
    """``--bucket-sizes 1,8 --kv-cache-dtype int8``."""
    texts = {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in arguments.items()
    }
    return " ".join(f"--{name.replace('_', '-')} {text}" for name, text in texts.items())
