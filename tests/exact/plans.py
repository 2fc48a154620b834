"""Plans for the matrix: of a model, and of some of its settings."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.exact.check import Plan, make_plan
from compiled_llm.exact.matrix import QUICK_SIZES, Setting
from compiled_llm.ops import native

FEW_GRAPHS = {"bucket_sizes": (8,), "token_bucket_sizes": (64,)}


def plan_of(
    model: Path = DEMO_MODEL,
    dtype: str = "bfloat16",
    caches: Sequence[str] = ("auto", "int8", "fp8"),
    sizes: Sequence[str] = QUICK_SIZES,
    num_requests: int = 9,
    num_tokens: int = 10,
    adapters: Sequence[str] = (),
    **more: Any,
) -> Plan:
    return make_plan({"model": str(model), "dtype": dtype, **more}, num_requests, num_tokens, caches, sizes, adapters)


def keep(plan: Plan, wanted: Callable[[Setting], bool]) -> Plan:
    """The plan with some of its settings."""
    return dataclasses.replace(plan, settings=[setting for setting in plan.settings if wanted(setting)])


def uncompiled(plan: Plan, *ways: str) -> Plan:
    """Its uncompiled settings, of the ways to be short of memory that are given, or of all."""
    return keep(plan, lambda setting: not setting.compiled and (not ways or setting.way in ways))


def kernels(name: str) -> Any:
    module = native.load(name)
    if module is None:
        pytest.skip("needs a C++ compiler")
    return module
