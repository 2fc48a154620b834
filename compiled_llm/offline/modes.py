"""Modes by name: engine arguments that go together, for short answer times or for many tokens a second."""

from collections.abc import Mapping
from typing import Any, Literal

MODES = ("low-latency", "balanced", "high-throughput")

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
}
# Weights and activations in 8 bits, and the cache too: half the bytes of a decode, and faster products of prompts.
_PRECISION = {"quantization": "int8_w8a8", "kv_cache_dtype": "int8"}


def mode_arguments(mode: str, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """The engine arguments that a mode stands for; none for "balanced", which is the engine's defaults.

    Args:
        mode: "low-latency": few requests at once and small steps, so that each token comes soon; "high-throughput":
            many requests at once and large steps; "balanced": in between, with nothing rounded.
        device: what the engine runs on.
    """
    return {**_SIZES[mode][device], **({} if mode == "balanced" else _PRECISION)}


def as_flags(arguments: Mapping[str, Any]) -> str:
    """``--bucket-sizes 1,8 --kv-cache-dtype int8``."""
    texts = {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in arguments.items()
    }
    return " ".join(f"--{name.replace('_', '-')} {text}" for name, text in texts.items())
