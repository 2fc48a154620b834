"""Times that a worker keeps of itself: of its start, and of its steps."""

import dataclasses


@dataclasses.dataclass
class StartTimes:
    """Seconds that the parts of a start took.

    Attributes:
        kernels: waiting for C++ kernels that were still being built when the first step had to run, and loading them.
        weights: reading or making the weights, and packing them.
        compile: taking compiled functions from disk or compiling them, and calling each once.
    """

    kernels: float = 0.0
    weights: float = 0.0
    compile: float = 0.0


@dataclasses.dataclass
class RunnerTimes:
    """Seconds since the engine was made, and rows of buckets that held no token.

    Attributes:
        prepare_seconds: filling buffers.
        launch_seconds: handing steps to the device; 0 on a CPU, which is the device.
        execute_seconds: launching, and waiting for the tokens; profiling not counted.
    """

    prepare_seconds: float = 0.0
    launch_seconds: float = 0.0
    execute_seconds: float = 0.0
    num_padding_tokens: int = 0
