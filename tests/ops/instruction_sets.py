"""Which instruction sets the C++ kernels are tested on.

The ordinary run has the best one of this machine and the portable one, so that no others are built; five ops, whose
portable kernels take longest to build, have the best one alone. What all portable kernels are written in
(``ops/cpu/vectors.h``) is tested by the others. A battery has all that this machine has.
"""

import functools
from collections.abc import Iterable
from typing import Any

import pytest

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import isas_of

_LONG = ("attention_cpu", "latent_attention_cpu", "quantized_linear_a8_cpu", "recurrent_cpu", "rowwise_cpu")


@functools.cache  # asked for each case of a sweep
def ordinary_sets(op: str) -> list[str]:
    """Those of the ordinary run: the best for the kernels of ``op``, if there is a compiler, and the portable one."""
    libraries = native.libraries_of(op)  # what calls the kernels, and the kernels
    best = [library.name.rpartition(".")[2] for library in libraries[1:]]
    plain = [] if op in _LONG or "portable" not in isas_of(op) else ["portable"]
    return list(dict.fromkeys([*best, *plain]))


def by_set(op: str, cases: Iterable[Any] | None = None) -> list[Any]:
    """Values of ``pytest.mark.parametrize``, those of other instruction sets marked as a battery.

    Args:
        cases: names of sets, or tuples that begin with one; None: all sets that there are kernels of ``op`` for.
    """
    ordinary = ordinary_sets(op)
    values = list(isas_of(op) if cases is None else cases)
    names = [value if isinstance(value, str) else value[0] for value in values]
    marks = [() if name in ordinary else pytest.mark.battery for name in names]
    ids = ["-".join(str(part).removeprefix("torch.") for part in ([v] if isinstance(v, str) else v)) for v in values]
    return [pytest.param(value, id=name, marks=mark) for value, name, mark in zip(values, ids, marks, strict=True)]


def skip_without(kernels: native.Kernels | None, isa: str) -> native.Kernels:
    """``kernels``, if there is a compiler and this machine has the set."""
    if kernels is None or isa not in kernels.supported_isas():
        pytest.skip(f"needs a C++ compiler and a CPU with {isa}")
    return kernels
