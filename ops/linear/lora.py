"""Low-rank changes of a linear layer, another one for each row: layout, reference, schema, registration.

    y[t] += B[s] @ (A[s] @ x[t]) * scale[s]        s = slots[t] - 1; a row whose slot is 0 stays as it is

LoRA: Hu et al., 2021, arXiv:2106.09685; many adapters in a batch: Punica, arXiv:2310.18547, S-LoRA, arXiv:2311.03285.
A layer may compute several parts at once, such as queries, keys and values: each has an A and a B of its own.

Letters: T rows, K inputs, N outputs of all parts, S slots, P parts, R the largest rank, a multiple of 16. The outputs
of B lie in tiles of 16, the last tile of each part filled up with zeros, so that a kernel reads B from its beginning to
its end:

    b[s, tile of part p, r, j] = B[s, p][16 * tile + j, r]
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import define_op, on_gpu

TILE = 16


class LoraWeights(NamedTuple):
    """What all slots of a layer hold. Written in place: a step reads the tensors where they are."""

    a: Tensor  # [S, P, R, K]
    b: Tensor  # [S, tiles, R, 16]
    ranks: Tensor  # [S, P] int32; 0: the adapter leaves the part as it is. What lies behind the rank is never read
    scales: Tensor  # [S, P] float32
    starts: Tensor  # [P + 1] int32: the first output of each part, and N

    @classmethod
    def empty(
        cls, parts: list[int], in_features: int, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> "LoraWeights":
        """Slots that change nothing, of ranks up to ``rank``. ``parts``: outputs of each part."""
        most = -(-rank // TILE) * TILE
        starts = torch.tensor([0, *parts]).cumsum(0, dtype=torch.int32)
        shapes = (num_slots, len(parts), most, in_features), (num_slots, sum(map(_tiles, parts)), most, TILE)
        on_cpu = device.type == "cpu"
        a, b = (native.huge_zeros(s, dtype) if on_cpu else torch.zeros(s, dtype=dtype, device=device) for s in shapes)
        return cls(
            a,
            b,
            torch.zeros(num_slots, len(parts), dtype=torch.int32, device=device),
            torch.zeros(num_slots, len(parts), device=device),
            starts.to(device),
        )


def tiles_of(b: Tensor) -> Tensor:
    """A part's ``B`` ``[outputs, rank]`` as ``LoraWeights.b`` has it: ``[tiles, rank, 16]`` contiguous."""
    filled = torch.nn.functional.pad(b, (0, 0, 0, -len(b) % TILE))
    return filled.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def _tiles(outputs: int) -> int:
    return -(-outputs // TILE)


def add_lora(y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    """Add to each row of ``y`` what the adapter of its slot changes; both sums are in float32, in one order.

    A row is computed by itself: its bits depend neither on the other rows nor on their slots. ``A x * scale`` is not
    rounded; ``y`` is rounded once. Where no row has a slot, nothing is read but ``slots``.

    Args:
        y: ``[T, N]`` float32, bfloat16 or float16, the last stride 1; written in place.
        x: ``[T, K]`` in the dtype of ``y``, the last stride 1.
        slots: ``[T]`` int32, 0 to S.
        weights: in the dtype of ``y``, contiguous.

    Returns:
        ``[T, P, R]`` float32: ``A x * scale``, as far as rows and ranks go; the rest is anything.

    Raises:
        ValueError: a tensor of another shape, dtype or layout. IndexError, on a CPU: a slot that there is not.
    """
    return torch.ops.compiled_llm.add_lora(y, x, slots, *weights)


def add_lora_reference(
    y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, starts: Tensor
) -> Tensor:
    """The op in plain torch: a slot and a part after the other."""
    shrunk = torch.zeros(len(x), *a.shape[1:3], device=x.device)
    bounds = starts.tolist()
    for slot in range(len(a)):
        rows = (slots == slot + 1).nonzero()[:, 0]
        tile = 0
        for part, (start, end) in enumerate(itertools.pairwise(bounds)):
            rank, count = int(ranks[slot, part]), _tiles(end - start)
            own = b[slot, tile : tile + count, :rank].transpose(1, 2).flatten(0, 1)[: end - start]
            tile += count
            if not rank or not len(rows):
                continue
            terms = x[rows].float() @ a[slot, part, :rank].float().t() * scales[slot, part]
            shrunk[rows, part, :rank] = terms
            y[rows, start:end] = (y[rows, start:end].float() + terms @ own.float().t()).to(y.dtype)
    return shrunk


def _fake(y: Tensor, x: Tensor, slots: Tensor, a: Tensor, *weights: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *a.shape[1:3], dtype=torch.float32)


define_op(
    "add_lora(Tensor(a!) y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor starts)"
    " -> Tensor",
    reference=add_lora_reference,
    fake=_fake,
    cpu="lora_cpu",
    gpu=on_gpu("linear.triton_lora:add_lora"),
)
