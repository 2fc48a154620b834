"""What the processor spends on a GPU's start, measured on a machine without a GPU: cold and warm, all buckets.

    compiled-llm bench start --without-gpu h200 --shape llama-3.1-8b --dtype bfloat16
    compiled-llm bench start --without-gpu h200 --shape qwen3-0.6b --bucket-sizes 1,8 --at-first-call

A start does here all that it does beside a GPU, on fake tensors, but for loading kernels and running them: processes
compile, this one finds and loads the code, and calls each function as often as its CUDA graphs would be captured
before the KV pool has its size. ``--at-first-call`` measures besides what one process spends where every function is
compiled when it is first called, as with cuda_graphs="trees": cold without any kernel, and warm up to the look into
torch's cache. Each start is a process of its own, ``python -m compiled_llm.bench.start_without_gpu``.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import engine_config
from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.bench.harness import finish
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.compiling import compiler, function
from compiled_llm.compiling.argument_specs import tensors_in
from compiled_llm.compiling.build_processes import Job
from compiled_llm.compiling.compiler import compile_at_first_call, own_copy
from compiled_llm.compiling.libraries import use_own_cache_directory
from compiled_llm.compiling.ready_code import load_ready
from compiled_llm.gpu_step.fake_step import DEVICE, faked, properties_of
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.gpu_step.inspection import first_layers
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import tensors
from compiled_llm.ops.torch_private import mark_static_address, tell_compiler
from compiled_llm.ops.torch_private_builds import build_without_gpu, builds_for_others, compiled_kernel, rehearse
from compiled_llm.ops.torch_private_gpu import FakeTensorMode, generate, pretend_gpu, trace
from compiled_llm.step.kv_cache import allocate, layer_dtypes
from compiled_llm.system.gpu_packages import check_triton
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.compiled_steps import CompiledSteps
from compiled_llm.worker.device import use_device
from compiled_llm.worker.memory import TRIAL_BLOCKS
from compiled_llm.worker.pool_sizes import PoolSizes, with_state_slots
from compiled_llm.worker.runner import STEP_DEFAULTS

_MAKE_TENSORS = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_strided")


class Pool:
    """Stands for GraphPool."""

    device, programmatic = DEVICE, False


class CalledInstead:
    """Stands for CapturedFunction: a capture is a call on fake tensors, which compiles or finds its kernels."""

    mode: FakeTensorMode

    def __init__(self, pool: Pool) -> None:
        self._outputs: dict[int, Any] = {}

    def capture(self, call: Callable, args: tuple) -> None:
        with self.mode:
            rehearse(lambda *args: self._outputs.__setitem__(id(args[1]), call(*args)), args)

    def __call__(self, *args: Any) -> Any:
        return self._outputs[id(args[1])]


def fake_on_gpu(mode: FakeTensorMode) -> Iterator[Any]:
    """Patches: what torch makes for a GPU is fake, and what it makes for the host is not."""
    for name in _MAKE_TENSORS:
        make = getattr(torch, name)

        def made(*args: Any, make: Callable = make, pin_memory: bool = False, **kwargs: Any) -> Any:
            if kwargs.get("device") is None or torch.device(kwargs["device"]).type == "cpu":
                return make(*args, **kwargs)
            with mode:
                return make(*args, **kwargs)

        yield mock.patch.object(torch, name, made)


def fake_steps(
    config: EngineConfig, model: ModelConfig, mode: FakeTensorMode, uses_trees: bool
) -> tuple[CompiledSteps, Sequence[torch.dtype]]:
    """An engine's steps before they are compiled, and the dtypes of its KV cache."""
    dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
    limits = EngineLimits.resolve(config, model.max_position_embeddings, STEP_DEFAULTS["cuda"])
    limits = with_state_slots(limits, config, model, dtype)
    cache_dtypes = layer_dtypes(config, dtype, model)
    use_device(DEVICE, cache_dtypes, model)
    described = family_of(model).describe(model, dtype, linears_of(config, model, DEVICE, dtype)).weights
    with mode:
        weights = faked(described)
    for tensor in tensors(weights):
        mark_static_address(tensor)
    sizes, blocks = PoolSizes.of(model, cache_dtypes, limits, dtype), TRIAL_BLOCKS
    places = {window: count + 1 for window, count in sizes.places(blocks - 1).items()}
    cache = allocate(model, cache_dtypes, blocks, limits.block_size, DEVICE, places, blocks)
    pool: Any = None if uses_trees else Pool()
    return CompiledSteps(config, model, limits, DEVICE, dtype, weights, cache, sizes, graph_pool=pool), cache_dtypes


def start(steps: CompiledSteps, cache_dtypes: Sequence[torch.dtype], workers: int | None) -> dict[str, Any]:
    """As an engine's start. Kernels of Inductor's are found or compiled, and not loaded."""
    loaded = mock.patch.object(compiler, "load_ready", lambda code, known: load_ready(code, known, compiled_kernel))
    captured = mock.patch.object(function, "CapturedFunction", CalledInstead)
    with loaded, captured, mock.patch.object(function, "_used_bytes", return_value=0):
        steps.compile(cache_dtypes, enforce_eager=False, num_workers=workers, progress=StartProgress("lines"))
    reports = steps.report().reports
    return {"functions": len(reports), "found": steps.report().cache_count("hit")}


def first_calls(jobs: list[Job], mode: FakeTensorMode, stops_at_cache: bool) -> dict[str, Any]:
    """All functions compiled by one process when they are first called, as far as that goes without a GPU."""
    with builds_for_others():
        for job in jobs:
            compiled = compile_at_first_call(own_copy(job.recipe(), job.name), cuda_graphs=False)
            tell_compiler(tensors_in(job.args))
            if stops_at_cache:
                trace(compiled, job.args, mode)
            else:
                generate(compiled, job.args, mode)
    return {"functions": len(jobs), "found": len(jobs) if stops_at_cache else 0}


STARTS = ("cold", "warm", "first call, cold", "first call, warm")


def one_start(config: EngineConfig, shape: str, gpu_name: str, layers: int, name: str) -> dict[str, Any]:
    """A start in this process, which takes the GPU to be there from then on. ``name``: one of ``STARTS``."""
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    use_own_cache_directory()
    gpu, mode = GPUS[gpu_name], FakeTensorMode(allow_non_fake_inputs=True)
    pretend_gpu(properties_of(gpu))
    build_without_gpu(gpu.capability)
    CalledInstead.mode = mode
    model, at_first_call = first_layers(parse_config(SHAPES[shape]), layers), name.startswith("first call")
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
        patches = list(fake_on_gpu(mode))
        for patch in patches:
            patch.start()
        steps, cache_dtypes = fake_steps(config, model, mode, uses_trees=at_first_call)
        jobs = steps.jobs()
        began, used = time.perf_counter(), os.times()
        if at_first_call:
            for patch in patches:
                patch.stop()
            result = first_calls(jobs, mode, name.endswith("warm"))
        else:
            result = start(steps, cache_dtypes, config.compile_workers)
        now = os.times()
    return result | {
        "seconds": time.perf_counter() - began,
        "own CPU seconds": now.user + now.system - used.user - used.system,
        "CPU seconds of processes": now.children_user + now.children_system,
    }


def measure(args: argparse.Namespace) -> int:
    """All starts that the flags of ``bench start`` ask for; the exit status."""
    check_triton("bench start --without-gpu")
    config = dataclasses.asdict(engine_config(argparse.Namespace(**{**vars(args), "model": None, "device": "cuda"})))
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="compiled-llm-start-") as directory:
        environment = {**os.environ, "COMPILED_LLM_CACHE": directory}
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        for name in STARTS if args.at_first_call else STARTS[:2]:
            given = json.dumps([config, args.shape, args.without_gpu, args.layers, name])
            command = [sys.executable, "-m", __name__, given]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            results[name] = json.loads(done.stdout.splitlines()[-1]) | {"load average": os.getloadavg()[0]}
    print(tables.text_table([{"start": name} | result for name, result in results.items()]))
    finish("start-without-gpu", {"shape": args.shape, "gpu": args.without_gpu, "starts": results}, args.json)
    return 0


def main() -> None:
    config, *rest = json.loads(sys.argv[1])
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config.items()
    }
    print(json.dumps(one_start(EngineConfig(**fields), *rest)))


if __name__ == "__main__":
    main()
