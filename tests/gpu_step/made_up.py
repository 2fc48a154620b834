"""An inspection of a step that nobody generated: two layers of a model of four, with round numbers."""

from typing import Any

from compiled_llm.gpu_step.amounts import Contexts, Work
from compiled_llm.gpu_step.estimate import Estimate
from compiled_llm.gpu_step.fake_step import FakeStep
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.gpu_step.inspection import Inspection, Row
from compiled_llm.gpu_step.launches import Launch, spans_of
from compiled_llm.scheduling.bucket import Bucket

ATTENTION = (("write_kernel", "op", "rotary_attention"), ("split_kernel", "op", "rotary_attention"))
LAYER = (("triton_red_fused_norm_3", "generated", ""), ("mm", "product", ""))
LAUNCHES = (("embedding", "torch", ""), *ATTENTION, *LAYER, *ATTENTION, *LAYER, ("clone", "copy", ""))
US = 10.0  # of a launch


def row(name: str, kind: str, op: str) -> Row:
    times: dict[str, Any] = {"memory": US / 1e6, "issue": US / 2e6, "matrix": 0.0}
    return Row(Launch(name, kind, op, (), ()), Work(1000, 500, flops=100), None, Estimate(**times))


def inspection() -> Inspection:
    rows = tuple(row(*launch) for launch in LAUNCHES)
    bucket = Bucket("decode", 8, 8)
    step = FakeStep(bucket, None, "bfloat16", (None, None), None, None, programmatic=False)  # type: ignore[arg-type]
    spans = spans_of([one.launch for one in rows])
    return Inspection(GPUS["h100"], step, Contexts.of(bucket, 1024), 4, rows, spans, (), ())
