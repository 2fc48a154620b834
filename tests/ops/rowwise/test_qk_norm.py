"""Norms of all queries together, and of all keys: on a CPU, interpreted, and compiled ahead of time."""

import functools
import subprocess
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import qk_norm
from compiled_llm.ops.rowwise.reference import qk_norm_reference
from tests.ops.rowwise.rowwise_cases import check, cut, numbers, weight

triton = pytest.importorskip("triton")

from compiled_llm.ops.rowwise import triton_rowwise  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

EPS = 1e-5


def agrees_with_the_reference(dtype: torch.dtype, norm_dtype: torch.dtype, q_size: int, k_size: int) -> None:
    """Also for rows that lie elsewhere, whose bits stay."""
    qkv = numbers(5, q_size + 2 * k_size, dtype)
    norms = weight(q_size, norm_dtype), weight(k_size, norm_dtype).flip(0)
    got = triton_rowwise.qk_norm(qkv, *norms, EPS)
    check((got,), (qk_norm_reference(qkv, *norms, EPS),), dtype, is_gelu=False)
    assert torch.equal(got[:, -k_size:], qkv[:, -k_size:])
    assert torch.equal(triton_rowwise.qk_norm(cut(qkv, slice(2, 4)), *norms, EPS), got[2:4])
    assert triton_rowwise.qk_norm(qkv[:0], *norms, EPS).shape == (0, qkv.shape[1])


CASES = (
    (torch.float32, torch.float32, 96, 32),
    (torch.bfloat16, torch.float32, 100, 20),
    (torch.float16, torch.float16, 9000, 64),
)
INTERPRETED = {
    f"{str(dtype)[6:]}-{str(norm)[6:]}-{q}": functools.partial(agrees_with_the_reference, dtype, norm, q, k)
    for dtype, norm, q, k in CASES
}


def test_a_cpu_norms_the_parts() -> None:
    qkv, norms = numbers(3, 64, torch.float32), (weight(32, torch.float32), weight(16, torch.float32))
    torch.testing.assert_close(qk_norm(qkv, *norms, EPS), qk_norm_reference(qkv, *norms, EPS))


def test_the_op_is_registered_as_torch_expects() -> None:
    given = (numbers(3, 64, torch.bfloat16), weight(32, torch.float32), weight(16, torch.float32), EPS)
    torch.library.opcheck(torch.ops.compiled_llm.qk_norm, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int], child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = ahead_of_time.recorded(monkeypatch, capability, triton_rowwise)
    norms = (torch.empty(size, device="meta") for size in (5120, 1024))
    triton_rowwise.qk_norm(torch.empty(8, 7168, dtype=torch.bfloat16, device="meta"), *norms, EPS)
    (launch,) = recorded
    binary, _ = ahead_of_time.without_spills(launch, capability, tmp_path)
    assert ".fma" not in binary.asm["ptx"], "a fused operation rounds once where the reference rounds twice"


def test_refuses_by_name() -> None:
    qkv = torch.ones(2, 12)
    for norms, message in (
        ((torch.ones(8), torch.ones(4)), r"qkv must have len\(q_norm\) \+ 2 \* len\(k_norm\) columns, 16, got 12"),
        ((torch.ones(8), torch.ones(2).half()), r"qk_norm: a weight must be a contiguous \[2\] of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_rowwise.qk_norm(qkv, *norms, EPS)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


if __name__ == "__main__":
    interpreted.run(INTERPRETED)
