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
    "llama-rope3-tied": Case("llama-rope3-tied", (9,), (5, 19)),
    "llama-biases": Case("llama-biases", (9,), (5, 19)),
    "mistral": Case("mistral", (9,), (5, 19)),
    "ministral3": Case("ministral3", (9,), (6, 19)),
    "smollm3": Case("smollm3", (10,), (5, 19)),
    "granite": Case("granite", (11,), (5, 21)),
    "phi3": Case("phi3", (9,), (5, 19)),
    "qwen2": Case("qwen2", (10,), (5, 19)),
    "qwen3": Case("qwen3", (9,), (5, 19)),
    "qwen3-untied": Case("qwen3-untied", (9,), (5, 19)),
    "mixtral": Case("mixtral", (35,), (5, 45)),
    "glm4-moe": Case("glm4-moe", (9, 49), (5, 59)),
    "gpt-oss": Case("gpt-oss", (36,), (5, 45)),
    "gemma2": Case("gemma2", (12,), (5, 22)),
    "gemma3": Case("gemma3", (13, 11), (5, 21)),
    "gemma4": Case("gemma4", (28, 20, 19), (8, 29)),
    "gemma4-moe": Case("gemma4-moe", (53,), (8, 58)),
    "olmo2": Case("olmo2", (14,), (7, 21)),
    "olmo3": Case("olmo3", (17, 15), (8, 21)),
    "glm": Case("glm", (9,), (5, 19)),
    "starcoder2": Case("starcoder2", (9,), (5, 19)),
    "starcoder2-without-biases": Case("starcoder2-without-biases", (9,), (5, 19)),
    "gpt-neox": Case("gpt-neox", (10,), (5, 20)),
    "gpt-neox-in-turn": Case("gpt-neox-in-turn", (9,), (5, 19)),
    "gpt2": Case("gpt2", (9,), (4, 19)),
    "glm4": Case("glm4", (11,), (5, 21)),
    "llama, KV cache in int8": Case("llama", (9,), (5, 19), arguments={"kv_cache_dtype": "int8"}),
    "llama, KV cache in fp8": Case("llama", (9,), (5, 19), arguments={"kv_cache_dtype": "fp8"}),
}

# Rules that do not hold yet: how often they are broken. A rule is "copies" (kernels of torch's that copy),
# "addmm_with_matrix" (a product that adds a matrix), "dynamic_inputs" (inputs of a graph without a static address),
# "skip_reasons" (for no CUDA graph), "spilled" (kernels whose registers go to memory).
KNOWN: dict[str, dict[str, int]] = {
    "llama": {"addmm_with_matrix": 1},
    "llama, a chunk of a prompt": {"addmm_with_matrix": 1},
    "qwen3-moe": {"copies": 8},
    "llama-rope3-tied": {"addmm_with_matrix": 1},
    "mistral": {"addmm_with_matrix": 1},
    "ministral3": {"addmm_with_matrix": 1},
    "smollm3": {"addmm_with_matrix": 1},
    "phi3": {"addmm_with_matrix": 1},
    "qwen2": {"addmm_with_matrix": 1},
    "qwen3": {"addmm_with_matrix": 1},
    "qwen3-untied": {"addmm_with_matrix": 1},
    "mixtral": {"copies": 8},
    "glm4-moe": {"copies": 6},
    "gpt-oss": {"copies": 8},
    "gemma4-moe": {"copies": 8},
    "olmo3": {"copies": 3},
    "glm": {"addmm_with_matrix": 1},
    "starcoder2-without-biases": {"addmm_with_matrix": 1},
    "llama, KV cache in int8": {"addmm_with_matrix": 1},
    "llama, KV cache in fp8": {"addmm_with_matrix": 1},
}
