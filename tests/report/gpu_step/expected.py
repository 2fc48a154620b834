"""What each family's step launches on a GPU: to be lowered with every launch that is saved.

Small models of ``tests/families.py``, a decode of two requests unless it says otherwise, H100.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """Attributes:

    launches_per_layer: from the attention of each layer to that of the next one.
    around: launches before the first layer's attention, and from the last layer's attention on.
    """

    family: str
    launches_per_layer: tuple[int, ...]
    around: tuple[int, int]
    bucket: str = "decode_2"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


STEPS = {
    "llama": Case("llama", (9,), (5, 19)),
    "llama, a chunk of a prompt": Case("llama", (11,), (5, 21), bucket="tokens_32"),
    "qwen3-moe": Case("qwen3-moe", (35, 9), (5, 45)),
}

# Rules that do not hold yet: how often they are broken. A rule is "copies" (kernels of torch's that copy),
# "addmm_with_matrix" (a product that adds a matrix), "dynamic_inputs" (inputs of a graph without a static address),
# "skip_reasons" (for no CUDA graph), "spilled" (kernels whose registers go to memory).
KNOWN: dict[str, dict[str, int]] = {
    "llama": {"addmm_with_matrix": 1},
    "llama, a chunk of a prompt": {"addmm_with_matrix": 1},
    "qwen3-moe": {"copies": 8},
}
