"""What machine a figure was measured on: hardware, versions, command. Every benchmark's JSON carries it."""

import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from compiled_llm.system.resources import granted_cores


def describe(device: torch.device) -> dict[str, Any]:
    """Hardware and versions, as plain JSON values, and the command line of this process.

    Paths in it are relative to the working directory: a result says nothing of where its machine keeps things.
    """
    facts: dict[str, Any] = {
        "command": shlex.join([*_program(), *map(_without_root, sys.argv[1:])]),
        "cpu": _cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        **_triton(),
        **_isa(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_sms": properties.multi_processor_count,
            "gpu_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def _program() -> list[str]:
    """What the command line began with: ``compiled-llm``, or a program of Python's."""
    path = Path(sys.argv[0])
    is_own = path.name == "compiled-llm" or path.parts[-2:] == ("compiled_llm", "__main__.py")
    return ["compiled-llm"] if is_own else ["python", os.path.relpath(path)]


def _without_root(argument: str) -> str:
    """An argument, a path from the root in it as one from the working directory: as a word, or behind ``--flag=``."""
    flag, equals, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    return f"{flag}{equals}{os.path.relpath(value)}" if os.path.isabs(value) else argument


def hardware(device: torch.device) -> dict[str, Any]:
    """What decides how fast ``device`` reads memory and multiplies: plain JSON values, equal in every process."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = Path("/proc/driver/nvidia/version")
        return {
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
            "bytes": properties.total_memory,
            "driver": driver.read_text().split("\n")[0] if driver.is_file() else "unknown",
            "torch": torch.__version__,
        }
    facts = _cpu_facts()
    return {
        "cpu": facts.get("model name", platform.machine()),
        "flags": " ".join(sorted(facts.get("flags", facts.get("Features", "")).split())),
        "cpus": granted_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **_isa(),
    }


def _triton() -> dict[str, str]:
    """Its version, if it is installed: only GPUs need it."""
    try:
        return {"triton": importlib.metadata.version("triton")}
    except importlib.metadata.PackageNotFoundError:
        return {}


def _isa() -> dict[str, str]:
    """The best instruction set that the C++ kernels may use, if the environment limits it (ops/cpu/features.h)."""
    limit = os.environ.get("COMPILED_LLM_ISA")
    return {} if limit is None else {"isa": limit}


def _cpu_facts() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, value in fields.items()}


def _cpu_name() -> str:
    facts = _cpu_facts()
    flags = facts.get("flags", facts.get("Features", "")).split()  # of x86, of ARM
    names = "avx2", "avx512f", "avx512_bf16", "amx_tile", "asimddp", "i8mm", "bf16"
    known = [name for name in names if name in flags]
    # A cloud's machines often say no more than "AMD EPYC": family and model tell one generation from the next.
    parts = [
        f"{name} {facts[name]}" for name in ("cpu family", "model", "CPU implementer", "CPU part") if name in facts
    ]
    name = facts.get("model name", platform.machine())
    return " ".join([f"{name} ({', '.join(parts)})" if parts else name, *known])
