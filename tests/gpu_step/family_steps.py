"""What a GPU would launch for small models, in a process of its own: it takes a GPU to be there that is not.

A program, with the name of the GPU: it reads a line, a JSON list of [name, family of tests/families.py, bucket, engine
arguments, how many different kernels to compile], and prints a JSON line for each, its name first.
"""

import copy
import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch._subclasses import fake_tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.gpu_step.fake_step import generate_step, pretend
from compiled_llm.gpu_step.gpus import GPUS, Gpu
from compiled_llm.gpu_step.kernels import Compiler
from compiled_llm.gpu_step.launches import Launch, launches_of, spans_of
from compiled_llm.models.config_file import parse_config
from tests.families import EVERY_CONFIG

_WAITS, _ENDS = "ACQBULK", ("BRA", "EXIT", "RET", "CALL", "BRX", "JMP")  # griddepcontrol.wait in machine code
_GLOBAL_MEMORY = re.compile(r"(?!LDS|STS|LDSM|STSM|LDC|ATOMS)(LD|ST|ATOM|RED|UTMA|UBLK)")  # CCTL.PF2 prefetches
# Of what no launch directly before writes, past this SM's own cache (``programmatic_launch.py``).
_OF_EARLIER = re.compile(r"LDG\..*STRONG\.GPU")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(@!?U?P\w+\s+)?(\S+)")


@functools.cache  # many launches of a step are of one kernel
def too_early(cubin: bytes) -> list[str]:
    """What a program of a programmatic launch does before it waits, and must not: memory, or a way around the wait.

    It may load, past its SM's cache, what launches before the last one have written: ``before_attention`` tells whether
    these have. Loads that take what they read for constant are counted wherever they are: these may be done before the
    wait, whatever the order of the code.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm", "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = _INSTRUCTION.findall(text)
    found = [name for _, name in instructions if _GLOBAL_MEMORY.match(name) and ".CONSTANT" in name]
    for predicate, name in instructions:
        if name.startswith(_WAITS):
            return [*found, predicate + name] if predicate else found
        if _OF_EARLIER.match(name):
            continue
        if _GLOBAL_MEMORY.match(name) or name.split(".")[0] in _ENDS:
            found.append(name)
    return ["it never waits"]


def behind_programmatic(launches: list[Launch]) -> list[str]:
    """Kernels of libraries behind programmatic launches: these might start early by themselves, and not wait."""
    pairs = itertools.pairwise(launches)
    return [after.name for before, after in pairs if before.is_programmatic and after.triton is None]


def before_attention(launches: list[Launch]) -> list[str]:
    """Launches directly before an attention that reads its plan, block table and cache before it waits."""
    pairs = itertools.pairwise(launches)
    return [before.name for before, after in pairs if after.name == "alone_kernel" and after.is_programmatic]


def step(gpu: Gpu, family: str, bucket: str, arguments: dict[str, Any], num_compiled: int) -> dict[str, Any]:
    """What the tests ask of a step."""
    class_name, fields = EVERY_CONFIG[family]
    published = getattr(transformers, class_name).config_class(**copy.deepcopy(fields)).to_dict()
    model = parse_config({**published, "architectures": [class_name], "dtype": "bfloat16"})
    model = dataclasses.replace(model, max_position_embeddings=4096)  # long enough that decodes are split
    sizes = {"bucket_sizes": (2,), "token_bucket_sizes": (32,), "cuda_graphs": "manual"}
    made = generate_step(EngineConfig(device="cuda", **{**sizes, **arguments}), model, bucket)
    launches = launches_of(made)
    compiler = Compiler(gpu)
    kernels = {launch.name: launch for launch in launches if launch.triton is not None}
    chosen = dict(sorted(kernels.items(), key=lambda one: not one[1].is_programmatic)[:num_compiled])
    compiled = {name: compiler.compile(launch.triton) for name, launch in chosen.items() if launch.triton is not None}
    spans = spans_of(launches)
    return {
        "layers": [[launch.name for launch in launches[span]] for span in spans],
        "before": [launch.name for launch in launches[: spans[0].start]],
        "after": [launch.name for launch in launches[spans[-1].stop :]],
        "copies": [launch.name for launch in launches if launch.kind == "copy"],
        "addmm_with_matrix": sum(launch.is_addmm_with_matrix for launch in launches),
        "dynamic_inputs": made.generated.dynamic_inputs,
        "skip_reasons": made.generated.skip_reasons,
        "spilled": {name: one.spilled for name, one in compiled.items() if one.spilled},
        "compiled": sorted(compiled),
        "programmatic": [launch.name for launch in launches if launch.triton is not None and launch.is_programmatic],
        "before_attention": before_attention(launches),
        "behind_programmatic": behind_programmatic(launches),
        "of_the_compiler": made.generated.code.count("'launch_pdl': True"),
        "too_early": {
            name: early
            for name, one in compiled.items()
            if kernels[name].is_programmatic and (early := too_early(one.cubin))
        },
    }


def wake_driver(device: torch.device) -> None:
    """What a build of torch with CUDA does for the first fake tensor on a GPU."""
    raise RuntimeError("Found no NVIDIA driver on your system")


if __name__ == "__main__":
    torch.set_num_threads(1)
    fake_tensor.init_gpu_context = wake_driver  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    gpu = GPUS[sys.argv[1]]
    pretend(gpu)
    for line in sys.stdin:
        torch.compiler.reset()
        print(json.dumps(step(gpu, *json.loads(line))), flush=True)
