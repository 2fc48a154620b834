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


BATCH_OF_64 = {"bucket_sizes": (64,), "token_bucket_sizes": (64,), "max_num_batched_tokens": 64}

STEPS = {
    "llama": Case("llama", (5,), (4, 15)),
    "llama, a chunk of a prompt": Case("llama", (8,), (4, 18), bucket="tokens_32"),
    "qwen3-moe": Case("qwen3-moe", (10, 5), (4, 20)),
    "llama, a batch of 64": Case("llama", (7,), (5, 17), bucket="decode_64", arguments=BATCH_OF_64),
    "llama-rope3-tied": Case("llama-rope3-tied", (5,), (4, 15)),
    "llama-biases": Case("llama-biases", (5,), (4, 15)),
    "mistral": Case("mistral", (5,), (4, 15)),
    "ministral3": Case("ministral3", (5,), (5, 15)),
    "smollm3": Case("smollm3", (6,), (4, 15)),
    "granite": Case("granite", (5,), (4, 16)),
    "phi3": Case("phi3", (5,), (4, 15)),
    "qwen2": Case("qwen2", (6,), (4, 15)),
    "qwen3": Case("qwen3", (5,), (4, 15)),
    "qwen3-untied": Case("qwen3-untied", (5,), (4, 15)),
    "mixtral": Case("mixtral", (10,), (4, 20)),
    "glm4-moe": Case("glm4-moe", (5, 14), (4, 24)),
    "gpt-oss": Case("gpt-oss", (11,), (4, 20)),
    "gemma2": Case("gemma2", (6,), (4, 17)),
    "gemma3": Case("gemma3", (6, 5), (5, 16)),
    "gemma4": Case("gemma4", (19, 16, 16), (19, 26)),
    "gemma4-moe": Case("gemma4-moe", (25,), (10, 32)),
    "olmo2": Case("olmo2", (8,), (7, 16)),
    "olmo3": Case("olmo3", (10, 9), (9, 16)),
    "glm": Case("glm", (5,), (4, 15)),
    "starcoder2": Case("starcoder2", (5,), (4, 15)),
    "starcoder2-without-biases": Case("starcoder2-without-biases", (5,), (4, 15)),
    "gpt-neox": Case("gpt-neox", (5,), (4, 16)),
    "gpt-neox-in-turn": Case("gpt-neox-in-turn", (5,), (4, 16)),
    "gpt2": Case("gpt2", (5,), (3, 16)),
    "glm4": Case("glm4", (5,), (4, 16)),
    "llama, KV cache in int8": Case("llama", (5,), (4, 15), arguments={"kv_cache_dtype": "int8"}),
    "llama, KV cache in fp8": Case("llama", (5,), (4, 15), arguments={"kv_cache_dtype": "fp8"}),
    "qwen3, weights in int8": Case("qwen3", (5,), (4, 15), arguments={"quantization": "int8"}),
    "qwen3, weights in int4": Case("qwen3", (5,), (4, 15), arguments={"quantization": "int4"}),
    "qwen3, weights in fp8": Case("qwen3", (5,), (4, 15), arguments={"quantization": "fp8"}),
    "qwen3, weights in mxfp4": Case("qwen3", (5,), (4, 15), arguments={"quantization": "mxfp4"}),
    "qwen3, W4A8": Case("qwen3", (5,), (4, 15), arguments={"quantization": "int4_w4a8"}),
    "qwen3, W8A8": Case("qwen3", (5,), (4, 15), arguments={"quantization": "int8_w8a8"}),
    "qwen3, W8A8, a chunk of a prompt": Case(
        "qwen3", (12,), (5, 21), bucket="tokens_32", arguments={"quantization": "int8_w8a8"}
    ),
    "qwen3, exact": Case("qwen3", (7,), (4, 17), arguments={"exact": True}),
}

# Rules that do not hold yet: how often they are broken. A rule is "copies" (kernels of torch's that copy),
# "addmm_with_matrix" (a product that adds a matrix), "dynamic_inputs" (inputs of a graph without a static address),
# "skip_reasons" (for no CUDA graph), "spilled" (kernels whose registers go to memory).
KNOWN: dict[str, dict[str, int]] = {
    "llama, a batch of 64": {"addmm_with_matrix": 1},
}
