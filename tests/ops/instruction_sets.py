"""The instruction sets that the tests of an op in C++ run on.

A library takes seconds to compile, so the ordinary run has two for each op: of the best set that this CPU has, and of
the portable one, but for two ops whose portable kernels take half a minute. ``pytest -m battery`` has the others.
"""

import pytest

from compiled_llm.ops import native

_LONG = ("rowwise_cpu", "recurrent_cpu")


def ordinary_sets(op: str) -> list[str]:
    """Best first; empty without a compiler."""
    sets = native.supported_isas(op)
    return [isa for isa in sets if isa == sets[0] or (isa == "portable" and op not in _LONG)]


def every_set(op: str) -> list:
    """Values of ``pytest.mark.parametrize``: all sets of this CPU, those of the battery marked so."""
    ordinary = ordinary_sets(op)
    return [
        pytest.param(isa, id=isa, marks=() if isa in ordinary else pytest.mark.battery)
        for isa in native.supported_isas(op)
    ]


def sets_together(op: str) -> list:
    """The same sets for tests that compare them with one reference: two values, each of several sets."""
    ordinary, every = ordinary_sets(op), native.supported_isas(op)
    return [
        pytest.param(ordinary, id="ordinary"),
        pytest.param(every, id="every set", marks=pytest.mark.battery),
    ]
