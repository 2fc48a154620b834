"""What the matrix compares by: digests that tell every bit."""

import torch

from compiled_llm.exact.matrix import row_digests


def test_row_digests_tell_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        width = torch.tensor([], dtype=dtype).itemsize
        rows = torch.randint(-128, 128, (3, 5 * width), dtype=torch.int8)
        expected = row_digests(rows.view(dtype))
        assert len(set(expected)) == 3
        assert row_digests(rows.view(dtype)[1:]) == expected[1:]
        for bit in range(8):
            changed = rows.clone()
            changed[1, 3] ^= -128 if bit == 7 else 1 << bit
            found = row_digests(changed.view(dtype))
            assert (found[0], found[2]) == (expected[0], expected[2])
            assert found[1] != expected[1]
    zeros = torch.tensor([[0.0], [-0.0]])
    assert len(set(row_digests(zeros))) == 2
