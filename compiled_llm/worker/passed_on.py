"""PassedOn: in the place of what runs after a step, in stages that pass the step on to another one."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from compiled_llm.compiling.build_processes import Job
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.worker.sampling_stage import SamplingStage


class PassedOn(SamplingStage):
    """Samples nothing, and keeps nothing of any request."""

    def __init__(self) -> None:
        """Without the buffers of a ``SamplingStage``."""

    @property
    def unwritten_bytes(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return 0

    def jobs(self, *of_all: Any) -> list[Job]:
        return []

    def uncached(self) -> list[str]:
        return []

    def functions(self) -> dict[str, CompiledFunction]:
        return {}

    def warm_up(self, bucket: Bucket, inputs: Any, logits: Callable[[], Tensor], make: Any) -> None:
        logits()  # which runs the step

    def warm_up_prompts(self, *of_all: Any) -> None:
        pass

    def record_again(self, bucket: Bucket, inputs: Any, logits: Callable[[], Tensor]) -> None:
        logits()

    def record_prompts_again(self, weights: Any) -> None:
        pass

    def admit(self, admissions: Sequence[Any], store: Any) -> None:
        pass

    def fill(self, *of_all: Any) -> None:
        pass

    def run(self, *of_all: Any) -> None:
        return None

    def prompt_logprobs(self, *of_all: Any) -> Any:
        return None
