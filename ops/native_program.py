"""Several calls of ops in one: a CPU runs them one after the other, without Python and without torch between them.

torch takes 2 us to find what an op of three arguments calls, and 5 us for one of ten: for a small model that is a fifth
of a step. A program has the calls with their arguments as C++ wants them (``cpu/program_cpu.cpp``). Between ops it may
make empty tensors, and call functions that torch's compiler has built. The interpreter's lock is free while it runs.

Tensors lie in numbered slots: first the inputs, then what the steps make.
"""

import ctypes
import functools
import itertools
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import op_library
from compiled_llm.ops.library import CPU_KERNELS, LIBRARY
from compiled_llm.ops.torch_private import op_without_python

# An argument: its kind, by its number in program_cpu.cpp, and a value.
KINDS = ("Tensor", "Optional[Tensor]", "int", "size", "float", "bool", "str")
VIEW, EMPTY = "", "empty"  # in the place of an op's name
# Of an empty tensor, by its number in program_cpu.cpp.
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn"),
)
MOST_ARGUMENTS = 32  # of an op or a kernel

LIBRARY.define("run_program(int program, int bound, Tensor[] inputs, int[] sizes) -> Tensor[]")


class Step(NamedTuple):
    """A call of an op or a kernel, a view, or an empty tensor.

    Attributes:
        op: its name; ``VIEW``: of ``arguments`` the first is a tensor, then come sizes, strides and an offset.
            ``EMPTY``: the first is the number of a dtype, then come sizes and strides. With a dot in it: a kernel of
            torch's compiler, which takes the memory of tensors, and sizes.
        arguments: (kind, value): the slot of a tensor (-1: none), the place of a size among ``sizes``, or a value.
        results: slots that it writes.
        last: slots that no later step uses.
    """

    op: str
    arguments: tuple[tuple[str, Any], ...]
    results: tuple[int, ...]
    last: tuple[int, ...]


class Program(NamedTuple):
    """Steps that run one after the other.

    Attributes:
        num_slots, num_inputs, num_arguments: of the slots the first are the inputs, and of these the graph's arguments.
        outputs: slots.
    """

    num_slots: int
    num_inputs: int
    num_arguments: int
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]


class Run:
    """A program that is ready to run: (arguments, other inputs, sizes) -> outputs.

    Args:
        made: the address of the program.
    """

    def __init__(self, library: ctypes.CDLL, made: int) -> None:
        self._library, self._made = library, made
        # At the interpreter's end other threads may be within it: it holds no lock.
        weakref.finalize(self, library.delete_program, made).atexit = False

    def __call__(self, arguments: list[Tensor], others: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return _run()(self._made, 0, arguments + others, sizes)

    def bound(self) -> "BoundRun":
        return BoundRun(self, self._library, self._made)


class BoundRun:
    """A run for calls with the same arguments: those of the first call, which it keeps. ``Run.bound`` makes it.

    It raises ``ValueError`` if the memory of one of them is another than at the first call.

    Attributes:
        held: the arguments.
    """

    def __init__(self, run: Run, library: ctypes.CDLL, made: int) -> None:
        self._of, self._made = run, made
        self._bound = library.make_bound()
        weakref.finalize(self, library.delete_bound, self._bound).atexit = False
        self.held: list[Tensor] = []
        self._is_filled = False

    def __call__(self, arguments: list[Tensor], others: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        if self._is_filled:  # torch finds the op by a tensor, so there must be one
            return _run()(self._made, self._bound, others or arguments[:1], sizes)
        outputs = _run()(self._made, self._bound, arguments + others, sizes)
        self.held, self._is_filled = arguments, True
        return outputs


@functools.cache
def _run() -> Callable:
    return op_without_python(torch.ops.compiled_llm.run_program.default)


def prepare(program: Program, kernels: Mapping[str, int] = MappingProxyType({})) -> Run | None:
    """None without a C++ compiler. The ops' kernels that it needs are built and loaded.

    ``kernels``: the addresses of the others, by the names of their steps.
    """
    library, texts = _library(), list[str]()
    if library is None:
        return None
    addresses = dict(kernels)
    for op in {step.op for step in program.steps} - set(addresses):
        if (address := _address(op)) is None:
            return None
        addresses[op] = address
    words = [program.num_slots, program.num_inputs, program.num_arguments, len(program.outputs), *program.outputs]
    words.append(len(program.steps))
    for step in program.steps:
        arguments = [_word(kind, value, texts) for kind, value in step.arguments]
        words += [_kind_of(step), addresses[step.op], len(arguments), *itertools.chain(*arguments)]
        words += [len(step.results), *step.results, len(step.last), *step.last]
    of_texts = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
    made = library.make_program((ctypes.c_int64 * len(words))(*words), of_texts, len(texts))
    assert made, "no op has so many arguments"
    return Run(library, made)


def _kind_of(step: Step) -> int:
    """By its number in program_cpu.cpp."""
    if step.op in (VIEW, EMPTY):
        return 1 + (step.op == EMPTY)
    return 3 if "." in step.op else 0


def _word(kind: str, value: Any, texts: list[str]) -> tuple[int, int]:
    number = KINDS.index(kind)
    if kind == "str":
        texts.append(value)
        return number, len(texts) - 1
    if kind == "float":
        return number, struct.unpack("<q", struct.pack("<d", value))[0]
    return number, int(value)


def _address(op: str) -> int | None:
    """Of the function that computes an op."""
    if op in (VIEW, EMPTY):
        return 0
    kernels = native.load(CPU_KERNELS[op])
    return None if kernels is None else kernels.address_of(op)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native.open_library(op_library("program_cpu"))
    if library is None:
        return None
    library.make_program.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    library.make_program.restype = ctypes.c_void_p
    library.make_bound.argtypes, library.make_bound.restype = (), ctypes.c_void_p
    for delete in (library.delete_program, library.delete_bound):
        delete.argtypes, delete.restype = (ctypes.c_void_p,), None
    library.register_program_op()
    return library
