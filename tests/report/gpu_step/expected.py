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
    programmatic: launches that may start while the one before still runs, of all.
    """

    family: str
    launches_per_layer: tuple[int, ...]
    around: tuple[int, int]
    bucket: str = "decode_2"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    programmatic: int = 0


PROGRAMMATIC = {"cuda_graphs": "programmatic"}
BATCH_OF_64 = {"bucket_sizes": (64,), "token_bucket_sizes": (64,), "max_num_batched_tokens": 64}

STEPS = {
    "llama": Case("llama", (5,), (4, 8)),
    "llama, a chunk of a prompt": Case("llama", (8,), (4, 11), bucket="tokens_32"),
    "qwen3-moe": Case("qwen3-moe", (6, 5), (4, 9)),
    "llama, a batch of 64": Case("llama", (7,), (5, 11), bucket="decode_64", arguments=BATCH_OF_64),
    "llama-rope3-tied": Case("llama-rope3-tied", (5,), (4, 8)),
    "llama-biases": Case("llama-biases", (5,), (4, 8)),
    "mistral": Case("mistral", (5,), (4, 8)),
    "ministral3": Case("ministral3", (5,), (5, 8)),
    "smollm3": Case("smollm3", (6,), (4, 8)),
    "granite": Case("granite", (5,), (4, 10)),
    "phi3": Case("phi3", (5,), (4, 8)),
    "qwen2": Case("qwen2", (6,), (4, 8)),
    "qwen3": Case("qwen3", (5,), (4, 8)),
    "qwen3-untied": Case("qwen3-untied", (5,), (4, 8)),
    "mixtral": Case("mixtral", (6,), (4, 9)),
    "glm4-moe": Case("glm4-moe", (5, 8), (4, 11)),
    "gpt-oss": Case("gpt-oss", (7,), (4, 9)),
    "gemma2": Case("gemma2", (6,), (4, 10)),
    "gemma3": Case("gemma3", (6, 5), (5, 9)),
    "gemma4": Case("gemma4", (13, 7, 7), (5, 13)),  # six of the first layer's: the tokens' embeddings of all layers
    "gemma4-moe": Case("gemma4-moe", (10,), (5, 14)),  # one of them: the angles of layers without a window
    "olmo2": Case("olmo2", (6,), (5, 9)),
    "olmo3": Case("olmo3", (7, 6), (6, 9)),
    "glm": Case("glm", (5,), (4, 8)),
    "starcoder2": Case("starcoder2", (5,), (4, 8)),
    "starcoder2-without-biases": Case("starcoder2-without-biases", (5,), (4, 8)),
    "gpt-neox": Case("gpt-neox", (5,), (4, 9)),
    "gpt-neox-in-turn": Case("gpt-neox-in-turn", (5,), (4, 9)),
    "gpt2": Case("gpt2", (5,), (3, 9)),
    "glm4": Case("glm4", (5,), (4, 9)),
    "llama, KV cache in int8": Case("llama", (5,), (4, 8), arguments={"kv_cache_dtype": "int8"}),
    "llama, KV cache in fp8": Case("llama", (5,), (4, 8), arguments={"kv_cache_dtype": "fp8"}),
    "qwen3, weights in int8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int8"}),
    "qwen3, weights in int4": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int4"}),
    "qwen3, weights in fp8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "fp8"}),
    "qwen3, weights in mxfp4": Case("qwen3", (5,), (4, 8), arguments={"quantization": "mxfp4"}),
    "qwen3, W4A8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int4_w4a8"}),
    "qwen3, W8A8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int8_w8a8"}),
    "qwen3, W8A8, a chunk of a prompt": Case(
        "qwen3", (12,), (5, 14), bucket="tokens_32", arguments={"quantization": "int8_w8a8"}
    ),
    "qwen3-moe, a chunk of a prompt": Case("qwen3-moe", (9, 8), (4, 12), bucket="tokens_32"),
    "qwen3-moe, a batch of 64": Case("qwen3-moe", (7, 7), (5, 10), bucket="decode_64", arguments=BATCH_OF_64),
    "qwen3-moe, exact": Case("qwen3-moe", (10, 7), (4, 13), arguments={"exact": True}),
    "qwen3-moe, weights in int8": Case("qwen3-moe", (6, 5), (4, 9), arguments={"quantization": "int8"}),
    "qwen3-moe, W4A8": Case("qwen3-moe", (6, 5), (4, 9), arguments={"quantization": "int4_w4a8"}),
    "gemma2, weights in int8": Case("gemma2", (8,), (4, 11), arguments={"quantization": "int8"}),
    "gemma3, W8A8": Case("gemma3", (8, 7), (5, 10), arguments={"quantization": "int8_w8a8"}),
    "olmo2, weights in int8": Case("olmo2", (8,), (5, 10), arguments={"quantization": "int8"}),
    "glm4, weights in int8": Case("glm4", (7,), (4, 10), arguments={"quantization": "int8"}),
    "granite, weights in int8": Case("granite", (5,), (4, 10), arguments={"quantization": "int8"}),
    "starcoder2, weights in int8": Case("starcoder2", (7,), (5, 10), arguments={"quantization": "int8"}),
    "gpt-neox, weights in int8": Case("gpt-neox", (7,), (5, 10), arguments={"quantization": "int8"}),
    "gpt-oss, weights in mxfp4": Case("gpt-oss", (7,), (4, 9), arguments={"quantization": "mxfp4"}),
    "deepseek-v2": Case("deepseek-v2", (8,), (5, 13)),
    "deepseek-v3": Case("deepseek-v3", (10,), (7, 13)),
    "deepseek-v3-halves": Case("deepseek-v3-halves", (8,), (5, 13)),
    "mistral4": Case("mistral4", (14,), (9, 13)),
    "deepseek-v2, a chunk of a prompt": Case("deepseek-v2", (9,), (5, 14), bucket="tokens_32"),
    "deepseek-v2, KV cache in int8": Case("deepseek-v2", (8,), (5, 13), arguments={"kv_cache_dtype": "int8"}),
    "deepseek-v2, exact": Case("deepseek-v2", (10,), (5, 18), arguments={"exact": True}),
    "lfm2": Case("lfm2", (6, 5, 5), (3, 8)),
    "qwen3.5": Case("qwen3.5", (9, 6, 8), (3, 9)),
    "qwen3-next": Case("qwen3-next", (14, 11, 8), (3, 16)),
    "granite-hybrid": Case("granite-hybrid", (9, 5, 8), (2, 13)),
    "nemotron-h": Case("nemotron-h", (8, 7, 5), (2, 9)),
    "qwen3.5, a chunk of a prompt": Case("qwen3.5", (12, 9, 10), (2, 12), bucket="tokens_32"),
    "qwen3.5-moe": Case("qwen3.5-moe", (13, 13, 14), (3, 14)),
    "lfm2-moe": Case("lfm2-moe", (5, 7, 6), (3, 9)),
    "granite-hybrid-moe": Case("granite-hybrid-moe", (12, 13, 9), (3, 17)),
    "lfm2-tied": Case("lfm2-tied", (6, 5, 5), (3, 8)),
    "nemotron-h-moe": Case("nemotron-h-moe", (16, 12, 6), (2, 19)),
    "qwen3, programmatic": Case("qwen3", (5,), (4, 8), arguments=PROGRAMMATIC, programmatic=11),
    "qwen3, W4A8, programmatic": Case(
        "qwen3", (5,), (4, 8), arguments=PROGRAMMATIC | {"quantization": "int4_w4a8"}, programmatic=11
    ),
    "qwen3, weights in int4, programmatic": Case(
        "qwen3", (5,), (4, 8), arguments=PROGRAMMATIC | {"quantization": "int4"}, programmatic=11
    ),
    "qwen3, KV cache in int8, programmatic": Case(
        "qwen3", (5,), (4, 8), arguments=PROGRAMMATIC | {"kv_cache_dtype": "int8"}, programmatic=11
    ),
    "qwen3, a chunk of a prompt, programmatic": Case(
        "qwen3", (8,), (4, 11), bucket="tokens_32", arguments=PROGRAMMATIC, programmatic=9
    ),
    "qwen3-moe, a batch of 32, programmatic": Case(
        "qwen3-moe",
        (6, 5),
        (4, 9),
        bucket="decode_32",
        arguments=PROGRAMMATIC | {"bucket_sizes": (32,)},
        programmatic=18,
    ),
    "qwen3-moe, programmatic": Case("qwen3-moe", (6, 5), (4, 9), arguments=PROGRAMMATIC, programmatic=18),
    "qwen3-moe, W4A8, programmatic": Case(
        "qwen3-moe", (6, 5), (4, 9), arguments=PROGRAMMATIC | {"quantization": "int4_w4a8"}, programmatic=18
    ),
    "gpt-oss, weights in mxfp4, programmatic": Case(
        "gpt-oss", (7,), (4, 9), arguments=PROGRAMMATIC | {"quantization": "mxfp4"}, programmatic=13
    ),
    "qwen3, exact": Case("qwen3", (7,), (4, 10), arguments={"exact": True}),
}

# Rules that do not hold yet: how often they are broken. A rule is "copies" (kernels of torch's that copy),
# "addmm_with_matrix" (a product that adds a matrix), "dynamic_inputs" (inputs of a graph without a static address),
# "skip_reasons" (for no CUDA graph), "spilled" (kernels whose registers go to memory).
KNOWN: dict[str, dict[str, int]] = {
    # Rows that are no multiple of 16 bytes, in these small models alone: latents of queries, and what heads give.
    "deepseek-v3": {"copies": 2},
    "mistral4": {"copies": 2},
    "deepseek-v2, exact": {"copies": 2},
    # Likewise: the gates of the norms behind states, which lie beside b and a, or dt, of few heads.
    "qwen3.5": {"copies": 2, "spilled": 1},  # 8 bytes, with heads of 24 alone, which no model has
    "qwen3-next": {"copies": 3},
    "granite-hybrid": {"copies": 3},
    "nemotron-h": {"copies": 3},
    "qwen3.5, a chunk of a prompt": {"copies": 2},
    "qwen3.5-moe": {"copies": 3},
    "granite-hybrid-moe": {"copies": 3},
    "nemotron-h-moe": {"copies": 3},
}
