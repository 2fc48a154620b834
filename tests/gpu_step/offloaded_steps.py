"""Steps of an engine with weights in host memory, for a GPU that is not there: a program, a process of its own.

    python -m tests.gpu_step.offloaded_steps SHAPE BUCKET GIB LAYERS

The same step without such weights is compiled, too. It prints a JSON line: how the compiled step has its launches and
copies, and whether it can be kept.
"""

import json
import sys
import warnings
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.compiling.build_worker import pretend_to_have
from compiled_llm.compiling.compiler import compile_ahead
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.ready_code import load_ready, ready_code
from compiled_llm.gpu_step.fake_step import generate_step, properties_of, step_on_fakes
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.gpu_step.inspection import first_layers
from compiled_llm.gpu_step.launches import Launch, Transfer, run_on_fakes
from compiled_llm.models.config_file import parse_config
from compiled_llm.ops.torch_private import lower_as_ops
from compiled_llm.ops.torch_private_builds import builds_for_others, compiled_kernel, rehearse
from compiled_llm.ops.torch_private_gpu import keep_nothing, storage_of


def faults(launches: list[Launch], transfers: list[Transfer]) -> list[str]:
    """Launches that read a buffer between a fetch and its wait, and copies that nobody awaits."""
    found, state, left = [], dict[int, str](), list(transfers)
    for place, launch in enumerate(launches):
        while left and left[0].place <= place:
            one = left.pop(0)
            if (state.get(one.buffer) == "begun") == (one.nbytes > 0):
                found.append(f"before launch {place}: a copy to a buffer that is not awaited, or a wait for none")
            state[one.buffer] = "begun" if one.nbytes else "there"
        filling = [state.get(storage_of(tensor)) for tensor in (*launch.read, *launch.written)].count("begun")
        found += [f"launch {place}, {launch.name}, has a buffer that is being filled"] * filling
    return [*found, *(f"{buffer} is not awaited" for buffer, now in state.items() if now != "there")]


def main(shape: str, bucket: str, gib: float, layers: int) -> dict[str, Any]:
    """What the tests ask of a step."""
    model = first_layers(parse_config(SHAPES[shape]), layers)
    engine = EngineConfig(device="cuda", dtype="bfloat16", max_model_len=2048, cpu_offload_gb=gib)
    pretend_to_have(GpuTarget(properties_of(GPUS["h100"]), programmatic=False))
    step = step_on_fakes(engine, model, bucket)
    lower_as_ops("compiled_llm")
    with step.mode, builds_for_others():
        ahead, facts = compile_ahead(step.function, bucket, step.args)
        code = ready_code(ahead)
        assert code is not None
        rehearse(load_ready(code, step.function.__globals__, compiled_kernel), step.args)
    keep_nothing()
    plain, _ = run_on_fakes(generate_step(EngineConfig(device="cuda", max_model_len=2048), model, bucket))
    made = generate_step(engine, model, bucket)
    launches, transfers = run_on_fakes(made)
    first_wait = next(one.place for one in transfers if not one.nbytes)
    return {
        "graphs": [facts["graphs"], facts["graph_breaks"]],
        "launches": [[one.name for one in launches], [one.name for one in plain]],
        "copies": [one.nbytes for one in transfers if one.nbytes],
        "buffers": len({one.buffer for one in transfers}),
        "first": [transfers[0].place, first_wait],
        "places": sorted({one.place for one in transfers if one.nbytes}),
        "waits": sorted({one.place for one in transfers if not one.nbytes}),
        "faults": faults(launches, transfers),
        "planted": [len(faults(launches, _without(transfers, one))) for one in range(len(transfers))],
        "programmatic": made.programmatic,
        "skip_reasons": made.generated.skip_reasons,
        "dynamic_inputs": made.generated.dynamic_inputs,
    }


def _without(transfers: list[Transfer], place: int) -> list[Transfer]:
    """The others: which ``faults`` must notice."""
    return [*transfers[:place], *transfers[place + 1 :]]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))))
