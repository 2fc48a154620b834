"""Copies of weights from host memory that run beside a step: a layer's weights come while others compute.

    fetch(x, host, buffer)     begin to copy; what was given to the device before may still read what the buffer had
    await_fetched(x, buffer)   what is given to the device from now on finds the copy done
    ... the layer reads the buffer ...

On a GPU the copies are in the order of a second stream, one after the other, since they share one bus. It waits for all
that the first stream was given before each ``fetch``; the first waits for a copy at its ``await_fetched``. Between the
two the buffer has neither the old nor the new weights. Both ops are captured as a fork and a join of a CUDA graph: a
graph must await all that it fetches.

The compiler is told that both write to the buffer: so it moves neither over what reads the buffer. And it is told that
they write to ``x``, the activations that the layers before have given and that the next layer reads. So both stay
between the two: a wait that came as early as its copy allows would leave nothing to compute beside the copy. A CPU,
which has no copies beside, copies at ``fetch``.
"""

import functools

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op


def fetch(x: Tensor, host: Tensor, buffer: Tensor) -> None:
    """Begin to copy ``host`` to ``buffer``, behind what has computed ``x``.

    Args:
        x: any tensor of activations; it is not changed.
        host: any shape and dtype, in host memory, pinned if the buffer is on a GPU. It must stay as it is.
        buffer: of the same shape, strides and dtype, on the device that computes.
    """
    torch.ops.compiled_llm.fetch(x, host, buffer)


def await_fetched(x: Tensor, buffer: Tensor) -> None:
    """Let what reads ``x`` or ``buffer`` wait for the copy that the last ``fetch`` to the buffer began."""
    torch.ops.compiled_llm.await_fetched(x, buffer)


@functools.cache
def _stream_beside(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """For the copies beside a stream: each has its own, so that no engine's copies get into another's graph."""
    return torch.cuda.Stream(main.device)


@functools.cache
def _arrival(device: torch.device, address: int) -> torch.cuda.Event:
    """That the last copy to the buffer at ``address`` is done. Each ``fetch`` records it anew."""
    return torch.cuda.Event()


def _begin_copy(x: Tensor, host: Tensor, buffer: Tensor) -> None:
    main = torch.cuda.current_stream(buffer.device)
    beside = _stream_beside(main)
    beside.wait_stream(main)
    with torch.cuda.stream(beside):
        buffer.copy_(host, non_blocking=True)
    _arrival(buffer.device, buffer.data_ptr()).record(beside)


def _await_copy(x: Tensor, buffer: Tensor) -> None:
    main = torch.cuda.current_stream(buffer.device)
    main.wait_event(_arrival(buffer.device, buffer.data_ptr()))


def _copy(x: Tensor, host: Tensor, buffer: Tensor) -> None:
    buffer.copy_(host)


def _nothing(*args: Tensor) -> None:
    """What is to be done for tensors without data; and where a copy is done as it begins."""


define_op("fetch(Tensor(a!) x, Tensor host, Tensor(b!) buffer) -> ()", reference=_copy, fake=_nothing, gpu=_begin_copy)
define_op("await_fetched(Tensor(a!) x, Tensor(b!) buffer) -> ()", reference=_nothing, fake=_nothing, gpu=_await_copy)
