"""Steps of deep models, compiled ahead for a GPU that is not there, with whatever torch runs this.

A program: ``python torch_version_steps.py [--unmended] SHAPE BUCKET ...``, one of ``checkpoint/shapes.py``. It prints a
JSON line for each bucket: the seconds of the processor, and how many bytes the code takes. ``--unmended``: without what
``lower_as_ops`` mends.
"""

import json
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
LAYERS = 32


def main() -> None:
    warnings.simplefilter("ignore")
    from compiled_llm.api.config import EngineConfig
    from compiled_llm.checkpoint.shapes import SHAPES
    from compiled_llm.compiling.build_worker import pretend_to_have
    from compiled_llm.compiling.compiler import compile_ahead
    from compiled_llm.compiling.gpu_properties import GpuTarget
    from compiled_llm.compiling.ready_code import ready_code
    from compiled_llm.gpu_step.fake_step import properties_of, step_on_fakes
    from compiled_llm.gpu_step.gpus import GPUS
    from compiled_llm.gpu_step.inspection import first_layers
    from compiled_llm.models.config_file import parse_config
    from compiled_llm.ops.torch_private import lower_as_ops
    from compiled_llm.ops.torch_private_builds import builds_for_others

    is_mended = "--unmended" not in sys.argv
    shape, *buckets = [word for word in sys.argv[1:] if not word.startswith("--")]
    model = first_layers(parse_config(SHAPES[shape]), LAYERS)
    assert model.num_layers == LAYERS
    pretend_to_have(GpuTarget(properties_of(GPUS["h200"]), programmatic=False))
    for bucket in buckets:
        began = time.process_time()
        step = step_on_fakes(EngineConfig(device="cuda", dtype="bfloat16", max_model_len=4096), model, bucket)
        if is_mended:
            lower_as_ops("compiled_llm")
        with step.mode, builds_for_others():
            ahead, facts = compile_ahead(step.function, bucket, step.args)
            code = ready_code(ahead)
        assert code is not None
        assert facts["graphs"] == 1
        seconds = round(time.process_time() - began, 1)
        print(json.dumps({"shape": shape, "bucket": bucket, "seconds": seconds, "bytes": len(code)}), flush=True)


if __name__ == "__main__":
    main()
