"""What the launches of layers with a state have to do: a state is read once and written once for each request.

Tensors of states have slots for many requests, of which a step uses some; so bytes follow from the step's requests.
"""

from collections.abc import Callable
from typing import Any

from compiled_llm.gpu_step.amounts import Contexts, Share, Work
from compiled_llm.gpu_step.launches import TritonKernel

Arguments = dict[str, Any]

_BFLOAT16 = 16  # bits of the products' operands
_SINGLE = frozenset({"clear_padding", "delta_steps"})  # beside another loop: for requests that this step does not have


def _bytes(a: Arguments, *names: str) -> int:
    return sum(a[name].nbytes for name in names if a[name] is not None)


def _convolution_state(a: Arguments, contexts: Contexts) -> int:
    return contexts.num_requests * (a["WIDTH"] - 1) * a["CHANNELS"] * a["state"].itemsize


def _convolution(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Its states, and where tokens are few its outputs."""
    state, rows = _convolution_state(a, contexts), contexts.num_requests * contexts.num_new
    entries = kernel.grid[0] * contexts.num_requests
    if not a["OUTPUTS"]:
        return Work(state, state, entries=entries, single=_SINGLE)
    read = state + _bytes(a, "x", "before", "after", "weight", "bias")
    flops = 2 * rows * a["CHANNELS"] * a["WIDTH"]
    return Work(read, state + a["out"].nbytes, flops, entries=entries, trips=entries * contexts.num_new, single=_SINGLE)


def _convolution_outputs(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    rows = contexts.num_requests * contexts.num_new
    read = _convolution_state(a, contexts) + _bytes(a, "x", "before", "after", "weight", "bias")
    return Work(read, a["out"].nbytes, 2 * rows * a["CHANNELS"] * a["WIDTH"])


def _steps(a: Arguments, kernel: TritonKernel, contexts: Contexts, rows: int, inputs: tuple[str, ...]) -> Work:
    """A recurrence over states of ``rows`` elements: a decay, a product and two sums or more of each and token."""
    state = contexts.num_requests * rows * a["state"].itemsize
    tokens = contexts.num_requests * contexts.num_new
    entries = kernel.grid[0] * a["HEADS"] * contexts.num_requests
    return Work(
        state + _bytes(a, *inputs), state + a["out"].nbytes, 6 * rows * tokens, entries=entries,
        trips=entries * contexts.num_new, single=_SINGLE,
    )  # fmt: skip


def _delta_steps(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    return _steps(a, kernel, contexts, a["HEADS"] * a["DK"] * a["DV"], ("q", "k", "v", "a", "b"))


def _scan_steps(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    return _steps(a, kernel, contexts, a["HEADS"] * a["HEAD_DIM"] * a["SIZE"], ("x", "dt", "B", "C"))


def _chunked(
    work: Work, kernel: TritonKernel, a: Arguments, contexts: Contexts, chunk: int, elements: int, extra: int = 0
) -> Work:
    """``work`` by chunks of so many tokens, whose products have so many multiply-adds in a program."""
    entries = kernel.grid[0] * a["HEADS"] * contexts.num_requests
    trips = entries * -(-contexts.num_new // chunk)
    padded = 2 * elements * trips
    return Work(work.read + extra, work.written, work.flops, padded, _BFLOAT16, entries, trips, single=_SINGLE)


def _delta_chunks(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """What the launch before it left is read besides. Factors in float32 are two: so are the products."""
    from compiled_llm.ops.recurrent.triton_delta_chunks import CHUNK

    work, chunk = _delta_steps(a, kernel, contexts), CHUNK.value
    elements = chunk * 2 * a["BLOCK_V"] * (3 * a["BLOCK_K"] + 4 * chunk)
    return _chunked(work, kernel, a, contexts, chunk, elements, _bytes(a, "inverses", "scores", "scalars"))


def _delta_factors(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Products of keys and queries, some elements at a time; then the inverse, of blocks that are joined twice."""
    from compiled_llm.ops.recurrent.triton_delta_chunks import BLOCK, CHUNK, LEVELS

    chunk = CHUNK.value
    entries = a["HEADS"] * contexts.num_requests * -(-contexts.num_new // chunk)
    trips = entries * -(-a["DK"] // a["BLOCK_K"])
    padded = 2 * chunk * chunk * (2 * a["BLOCK_K"] * trips + entries * LEVELS.value * 2 * 2 * 2 * chunk)
    flops = 4 * contexts.num_requests * contexts.num_new * chunk * a["DK"] * a["HEADS"]
    return Work(
        _bytes(a, "q", "k", "a", "b"), _bytes(a, "inverses", "scores", "scalars"), flops, padded, _BFLOAT16, entries,
        trips, shares={"_inverse_of_blocks": Share(entries, BLOCK.value - 1)},
    )  # fmt: skip


def _scan_chunks(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    from compiled_llm.ops.recurrent.triton_scan_chunks import CHUNK

    work, chunk = _scan_steps(a, kernel, contexts), CHUNK.value
    elements = chunk * (2 * a["BLOCK_P"] * a["BLOCK_N"] + chunk * (a["BLOCK_N"] + a["BLOCK_P"]))
    return _chunked(work, kernel, a, contexts, chunk, elements)


STATE_RULES: dict[str, Callable[[Arguments, TritonKernel, Contexts], Work]] = {
    "convolution_kernel": _convolution,
    "convolution_outputs_kernel": _convolution_outputs,
    "delta_steps_kernel": _delta_steps,
    "delta_chunks_kernel": _delta_chunks,
    "delta_factors_kernel": _delta_factors,
    "scan_steps_kernel": _scan_steps,
    "scan_chunks_kernel": _scan_chunks,
}
