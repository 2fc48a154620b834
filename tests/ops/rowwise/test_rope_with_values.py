"""Heads turned and values normed in one launch: on a CPU, interpreted, and compiled ahead of time."""

import functools
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import rope_with_values
from compiled_llm.ops.rowwise.rope_with_values import rope_with_values_reference
from tests.ops.rowwise.rowwise_cases import check, cut, numbers, weight

triton = pytest.importorskip("triton")

from compiled_llm.ops.rowwise import triton_rowwise  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

EPS = 1e-5


def arguments(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, keys_are_values: bool) -> tuple:
    qkv = numbers(5, (heads + kv_heads * (1 if keys_are_values else 2)) * head_dim, dtype)
    angles = torch.arange(5 * head_dim // 2).view(5, -1) / 7
    norms = (weight(head_dim, torch.float32).roll(shift) for shift in range(3))
    return qkv, torch.cat([angles.cos(), angles.sin()], 1), *norms, heads, kv_heads, EPS


def agrees_with_the_reference(dtype: torch.dtype, *sizes) -> None:
    """Also for rows that lie elsewhere, whose bits stay."""
    given = arguments(dtype, *sizes)
    got = triton_rowwise.rope_with_values(*given)
    check(got, rope_with_values_reference(*given), dtype, is_gelu=False)
    rows = cut(given[0], slice(2, 4)), given[1][2:4]
    part: tuple[Tensor, ...] = triton_rowwise.rope_with_values(*rows, *given[2:])
    assert all(torch.equal(one, whole[2:4]) for one, whole in zip(part, got, strict=True))


CASES = (
    (torch.float32, 4, 2, 24, False),
    (torch.bfloat16, 3, 1, 48, True),
    (torch.float16, 8, 8, 256, False),
)
INTERPRETED = {f"{str(case[0])[6:]}-{case[3]}": functools.partial(agrees_with_the_reference, *case) for case in CASES}


@pytest.mark.parametrize("keys_are_values", [False, True])
def test_a_cpu_has_two_ops(keys_are_values: bool) -> None:
    given = arguments(torch.float32, 4, 2, 24, keys_are_values)
    for got, want in zip(rope_with_values(*given), rope_with_values_reference(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_the_op_is_registered_as_torch_expects() -> None:
    given = arguments(torch.bfloat16, 4, 2, 24, False)
    torch.library.opcheck(torch.ops.compiled_llm.rope_with_values, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int], child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded: list = []
    recorder = ahead_of_time.Recorder(triton_rowwise.rope_kernel, recorded)
    monkeypatch.setattr(triton_rowwise, "rope_kernel", recorder)
    qkv, cos_sin = torch.empty(8, 16 * 512, dtype=torch.bfloat16, device="meta"), torch.empty(8, 512, device="meta")
    norms = [torch.empty(512, device="meta")] * 3
    triton_rowwise.rope_with_values(qkv, cos_sin, *norms, 8, 4, EPS)
    ((kernel, args, kwargs),) = recorded
    binary = ahead_of_time.compiled(kernel, args, kwargs, capability)
    usage = ahead_of_time.resources(binary.asm["cubin"], tmp_path / "kernel.cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


if __name__ == "__main__":
    interpreted.run(INTERPRETED)
