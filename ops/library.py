"""How an op is declared: ``define_op``, called once for each op at the end of the op's file.

All ops are in torch's one namespace ``compiled_llm``, so the op ``rope`` is ``torch.ops.compiled_llm.rope``.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.torch_private_builds import same_keys_in_any_order

LIBRARY = torch.library.Library("compiled_llm", "DEF")
CPU_KERNELS: dict[str, str] = {}
"""Op -> the C++ file of its kernels for CPUs."""


def define_op(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    cpu: str | None = None,
    gpu: Callable[..., Any] | None = None,
    gpu_exact: Callable[..., Any] | None = None,
) -> None:
    """Declare an op, all of it: torch then knows its arguments, its shapes, and what computes it on which device.

    Every function here takes the arguments of the schema, in that order and by their places. The compiler needs nothing
    more: it calls all ops of the namespace as they are (``lower_as_ops`` in ``torch_private.py``).

    Args:
        schema: ``NAME(arguments) -> results`` in torch's words; ``Tensor(a!)`` is an argument that is written to.
        fake: makes the results, for tensors that have shapes but no data.
        reference: the op in plain torch, which serves where there is no kernel; None: the op is for GPUs alone, or
            stands in a graph that is never run.
        cpu: the kernels for CPUs are those of the C++ file of this name. Its library is built and loaded when one of
            its ops is first called, and registers its kernels itself. From then on no call of the op goes through
            Python. Without a C++ compiler, and for None, a CPU has the reference.
        gpu: the op on CUDA tensors, mostly ``on_gpu``; None: the reference.
        gpu_exact: declares a second op ``NAME_exact`` of the same arguments, whose rows have the same bits in any
            batch. This is the function for CUDA tensors. On a CPU it is the op itself, which is exact there.
    """
    name, arguments = schema.split("(", 1)
    plain = reference
    if cpu is not None:
        assert reference is not None, "what runs without a C++ compiler"
        CPU_KERNELS[name] = cpu
        plain = functools.partial(_without_kernels, name, cpu, reference)
    _define(schema, fake, plain, gpu or reference)
    if gpu_exact is not None:
        on_cpu = None if reference is None else functools.partial(_call, name)
        _define(f"{name}_exact({arguments}", fake, on_cpu, gpu_exact)


def on_gpu(place: str, **options: Any) -> Callable[..., Any]:
    """A function of a file with Triton kernels, which the first call imports: importing the ops must not load Triton.

    Args:
        place: ``module:function``, the module below ``compiled_llm.ops``.
        options: keyword arguments that it gets with every call.
    """
    module, function = place.split(":")

    def call(*args: Any) -> Any:
        same_keys_in_any_order()
        return getattr(importlib.import_module(f"compiled_llm.ops.{module}"), function)(*args, **options)

    return call


def like_first(x: Tensor, *args: Any) -> Tensor:
    """The ``fake`` of ops whose result has the shape and dtype of their first argument, contiguous."""
    return x.new_empty(x.shape)


def _define(schema: str, fake: Callable, plain: Callable | None, gpu: Callable | None) -> None:
    name = LIBRARY.define(schema)
    torch.library.register_fake(f"{LIBRARY.ns}::{name}", fake, lib=LIBRARY)
    if plain is not None:
        LIBRARY.impl(name, plain, "CompositeExplicitAutograd")
    if gpu is not None:
        LIBRARY.impl(name, gpu, "CUDA")


def _without_kernels(name: str, cpu: str, reference: Callable, *args: Any) -> Any:
    """Until the C++ library is loaded, which registers its kernels; or for good, without a compiler."""
    return _call(name, *args) if native.load(cpu) else reference(*args)


def _call(name: str, *args: Any) -> Any:
    return getattr(torch.ops.compiled_llm, name)(*args)
