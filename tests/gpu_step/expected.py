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
BATCH_OF_72 = {"bucket_sizes": (72,), "token_bucket_sizes": (72,), "max_num_batched_tokens": 72}
ADAPTERS = {"enable_lora": True, "lora_target_modules": ["all-linear", "experts"]}
ROWS_256 = {"token_bucket_sizes": (256,), "max_num_batched_tokens": 256, **ADAPTERS}
ROWS_512 = {"token_bucket_sizes": (512,), "max_num_batched_tokens": 512, **ADAPTERS}

STEPS = {
    "llama": Case("llama", (7,), (5, 10)),
    "llama, a chunk of a prompt": Case("llama", (10,), (5, 13), bucket="tokens_32"),
    "qwen3-moe": Case("qwen3-moe", (7, 7), (5, 10)),
    "llama, a batch of 64": Case("llama", (8,), (5, 12), bucket="decode_64", arguments=BATCH_OF_64),
    "llama-rope3-tied": Case("llama-rope3-tied", (7,), (5, 10)),
    "llama-biases": Case("llama-biases", (7,), (5, 10)),
    "llama-biases, a request alone": Case(
        "llama-biases", (7,), (5, 10), bucket="decode_1", arguments={"bucket_sizes": (1,)}
    ),
    "mistral": Case("mistral", (7,), (5, 10)),
    "ministral3": Case("ministral3", (7,), (6, 10)),
    "smollm3": Case("smollm3", (8,), (5, 10)),
    "granite": Case("granite", (7,), (5, 11)),
    "phi3": Case("phi3", (7,), (5, 10)),
    "qwen2": Case("qwen2", (8,), (5, 10)),
    "seed-oss": Case("seed-oss", (7,), (5, 10)),
    "seed-oss-tied": Case("seed-oss-tied", (7,), (5, 10)),
    "qwen3": Case("qwen3", (7,), (5, 10)),
    "qwen3-untied": Case("qwen3-untied", (7,), (5, 10)),
    "mixtral": Case("mixtral", (7,), (5, 10)),
    "glm4-moe": Case("glm4-moe", (7, 9), (5, 12)),
    "gpt-oss": Case("gpt-oss", (8,), (5, 10)),
    "gemma2": Case("gemma2", (8,), (5, 12)),
    "gemma3": Case("gemma3", (8, 7), (6, 11)),
    "gemma4": Case("gemma4", (17, 11, 11), (6, 16)),  # six of the first layer's: the tokens' embeddings of all layers
    "gemma4-moe": Case("gemma4-moe", (12,), (6, 15)),  # one of them: the angles of layers without a window
    "olmo2": Case("olmo2", (8,), (5, 11)),
    "olmo3": Case("olmo3", (9, 8), (6, 11)),
    "glm": Case("glm", (7,), (5, 10)),
    "starcoder2": Case("starcoder2", (7,), (5, 10)),
    "starcoder2-without-biases": Case("starcoder2-without-biases", (7,), (5, 10)),
    "gpt-neox": Case("gpt-neox", (7,), (5, 10)),
    "gpt-neox-in-turn": Case("gpt-neox-in-turn", (7,), (5, 10)),
    "gpt2": Case("gpt2", (7,), (4, 10)),
    "glm4": Case("glm4", (7,), (5, 11)),
    "llama, KV cache in int8": Case("llama", (7,), (5, 10), arguments={"kv_cache_dtype": "int8"}),
    "llama, KV cache in fp8": Case("llama", (7,), (5, 10), arguments={"kv_cache_dtype": "fp8"}),
    "qwen3, weights in int8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int8"}),
    "qwen3, weights in int4": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int4"}),
    "qwen3, weights in fp8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "fp8"}),
    "qwen3, weights in mxfp4": Case("qwen3", (5,), (4, 8), arguments={"quantization": "mxfp4"}),
    "qwen3, W4A8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int4_w4a8"}),
    "qwen3, W8A8": Case("qwen3", (5,), (4, 8), arguments={"quantization": "int8_w8a8"}),
    "qwen3, W8A8, a chunk of a prompt": Case(
        "qwen3", (12,), (5, 14), bucket="tokens_32", arguments={"quantization": "int8_w8a8"}
    ),
    # What adapters change is in the launches of the products.
    "qwen3, adapters": Case("qwen3", (7,), (5, 10), bucket="decode_2_lora", arguments={"enable_lora": True}),
    "qwen3, adapters, a chunk of a prompt": Case("qwen3", (10,), (5, 13), "tokens_32", {"enable_lora": True}),
    # One launch more, behind queries, keys and values; the others compute what follows, too.
    "qwen3, adapters, a batch of 64": Case(
        "qwen3", (9,), (6, 12), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True}
    ),
    "qwen3, adapters, a batch of 64 in float32": Case(
        "qwen3", (9,), (6, 12), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True, "dtype": "float32"}
    ),
    "gemma2, a batch of 64": Case("gemma2", (9,), (5, 13), "decode_64", BATCH_OF_64),
    "gemma2, adapters, a batch of 64": Case(
        "gemma2", (10,), (6, 13), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True}
    ),
    "qwen3-moe, adapters": Case("qwen3-moe", (7, 7), (5, 10), "decode_2_lora", {"enable_lora": True}),
    "qwen3-moe, adapters, a batch of 64": Case(
        "qwen3-moe", (8, 9), (6, 10), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True}
    ),
    "qwen3-moe, adapters of experts": Case(
        "qwen3-moe",
        (7, 7),
        (5, 10),
        "decode_2_lora",
        {"enable_lora": True, "lora_target_modules": ["all-linear", "experts"]},
    ),
    "qwen3-moe, adapters of experts, a batch of 64": Case(
        "qwen3-moe",
        (8, 9),
        (6, 10),
        "decode_64_lora",
        {**BATCH_OF_64, "enable_lora": True, "lora_target_modules": ["all-linear", "experts"]},
    ),
    # Norm, logits and the choice by themselves.
    "qwen3-moe, adapters of routers": Case(
        "qwen3-moe",
        (9, 7),
        (5, 12),
        "decode_2_lora",
        {"enable_lora": True, "lora_target_modules": ["all-linear", "gate"]},
    ),
    # One more, of a shared expert.
    "deepseek-v2, adapters": Case("deepseek-v2", (10,), (6, 15), "decode_2_lora", {"enable_lora": True}),
    "deepseek-v2, a batch of 64": Case("deepseek-v2", (11,), (6, 15), "decode_64", BATCH_OF_64),
    "deepseek-v2, adapters, a batch of 64": Case(
        "deepseek-v2", (12,), (7, 16), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True}
    ),
    "qwen3-moe, adapters of experts, a batch of 72": Case(
        "qwen3-moe",
        (8, 9),
        (6, 10),
        "decode_72_lora",
        {**BATCH_OF_72, "enable_lora": True, "lora_target_modules": ["all-linear", "experts"]},
    ),
    "deepseek-v2, adapters, a batch of 72": Case(
        "deepseek-v2", (12,), (7, 16), "decode_72_lora", {**BATCH_OF_72, "enable_lora": True}
    ),
    # At most two more a layer than without adapters, in steps of any size. In brackets: without them.
    "mixtral, adapters of experts, 256 tokens": Case(
        "mixtral", (11,), (6, 13), "tokens_256", ROWS_256
    ),  # (10,), (5, 13)
    "deepseek-v2, adapters of experts, 512 tokens": Case(  # (12,), (6, 21)
        "deepseek-v2", (13,), (7, 22), "tokens_512", ROWS_512
    ),
    "deepseek-v3, adapters of experts, 512 tokens": Case(  # (15,), (9, 21), with two copies
        "deepseek-v3", (15,), (9, 22), "tokens_512", ROWS_512
    ),
    "mistral4, adapters of experts, 512 tokens": Case(  # (22,), (11, 20), with two copies
        "mistral4", (23,), (11, 21), "tokens_512", ROWS_512
    ),
    "glm4-moe, adapters of experts, 512 tokens": Case(  # (11, 18), (5, 21)
        "glm4-moe", (12, 20), (6, 22), "tokens_512", ROWS_512
    ),
    "granite-hybrid-moe, adapters of experts, 512 tokens": Case(  # (20, 22, 19), (3, 24)
        "granite-hybrid-moe", (22, 24, 21), (4, 25), "tokens_512", ROWS_512
    ),
    "glm4-moe, adapters of experts, weights in int8": Case(  # (5, 8), (4, 11)
        "glm4-moe", (5, 10), (4, 13), "decode_2_lora", {**ADAPTERS, "quantization": "int8"}
    ),
    "qwen3.5-moe, adapters of experts, 512 tokens": Case(  # (21, 21, 23), (3, 23)
        "qwen3.5-moe", (23, 23, 25), (4, 24), "tokens_512", ROWS_512
    ),
    # One from attention or a convolution to the next is three of its layers: +1 for that one's projections, +2 for
    # experts, whose latents bring two products.
    "nemotron-h-moe, adapters of experts, 512 tokens": Case(  # (24, 22, 8), (3, 27)
        "nemotron-h-moe", (27, 25, 9), (4, 29), "tokens_512", ROWS_512
    ),
    "starcoder2, adapters, a batch of 64": Case(  # (8,), (5, 12) without them; the others here 9 and 8 a layer
        "starcoder2", (9,), (6, 12), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True}
    ),
    "gpt-neox, adapters, a batch of 64": Case(
        "gpt-neox", (10,), (6, 12), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True}
    ),
    "gpt2, adapters, a batch of 64": Case(
        "gpt2", (9,), (5, 11), "decode_64_lora", {**BATCH_OF_64, "enable_lora": True}
    ),
    "qwen3, adapters, none used": Case("qwen3", (7,), (5, 10), arguments={"enable_lora": True}),
    "qwen3, adapters, programmatic": Case(
        "qwen3", (7,), (5, 10), "decode_2_lora", {**PROGRAMMATIC, "enable_lora": True}, programmatic=16
    ),
    **{
        f"{family}, adapters, weights in {weights}": Case(
            family, (5,), (4, 8), "decode_2_lora", {"enable_lora": True, "quantization": weights}
        )
        for family, weights in (
            ("qwen3", "int8"),
            ("qwen3", "int4"),
            ("qwen3", "fp8"),
            ("qwen3", "int8_w8a8"),
            ("llama", "int8"),
        )
    },
    "llama, adapters": Case("llama", (7,), (5, 10), bucket="decode_2_lora", arguments={"enable_lora": True}),
    "qwen3-moe, a chunk of a prompt": Case("qwen3-moe", (10, 10), (5, 13), bucket="tokens_32"),
    "qwen3-moe, a batch of 64": Case("qwen3-moe", (7, 8), (5, 10), bucket="decode_64", arguments=BATCH_OF_64),
    "qwen3-moe, exact": Case("qwen3-moe", (11, 9), (5, 14), arguments={"exact": True}),
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
    "deepseek-v2": Case("deepseek-v2", (10,), (6, 14)),
    "deepseek-v3": Case("deepseek-v3", (13,), (9, 14)),
    "deepseek-v3-halves": Case("deepseek-v3-halves", (10,), (6, 14)),
    "mistral4": Case("mistral4", (16,), (11, 14)),
    "deepseek-v2, a chunk of a prompt": Case("deepseek-v2", (11,), (6, 15), bucket="tokens_32"),
    "deepseek-v2, KV cache in int8": Case("deepseek-v2", (10,), (6, 14), arguments={"kv_cache_dtype": "int8"}),
    "deepseek-v2, exact": Case("deepseek-v2", (11,), (6, 18), arguments={"exact": True}),
    "lfm2": Case("lfm2", (8, 7, 7), (4, 10)),
    "qwen3.5": Case("qwen3.5", (11, 8, 10), (4, 11)),
    "qwen3-next": Case("qwen3-next", (15, 12, 10), (4, 17)),
    "granite-hybrid": Case("granite-hybrid", (11, 7, 10), (3, 14)),
    "nemotron-h": Case("nemotron-h", (10, 8, 7), (3, 10)),
    "qwen3.5, a chunk of a prompt": Case("qwen3.5", (14, 11, 12), (3, 14), bucket="tokens_32"),
    "qwen3.5-moe": Case("qwen3.5-moe", (14, 14, 15), (4, 15)),
    "lfm2-moe": Case("lfm2-moe", (7, 8, 7), (4, 10)),
    "granite-hybrid-moe": Case("granite-hybrid-moe", (13, 14, 10), (4, 17)),
    "lfm2-tied": Case("lfm2-tied", (8, 7, 7), (4, 10)),
    "nemotron-h-moe": Case("nemotron-h-moe", (17, 13, 7), (3, 20)),
    "qwen3, programmatic": Case("qwen3", (7,), (5, 10), arguments=PROGRAMMATIC, programmatic=16),
    "llama-biases, a request alone, programmatic": Case(  # its heads have 64 elements, for which there is that kernel
        "llama-biases",
        (7,),
        (5, 10),
        bucket="decode_1",
        arguments=PROGRAMMATIC | {"bucket_sizes": (1,)},
        programmatic=16,
    ),
    "llama-biases, a request alone, KV cache in int8, programmatic": Case(
        "llama-biases",
        (7,),
        (5, 10),
        bucket="decode_1",
        programmatic=16,
        arguments=PROGRAMMATIC | {"bucket_sizes": (1,), "kv_cache_dtype": "int8"},
    ),
    "qwen3, W4A8, programmatic": Case(
        "qwen3", (5,), (4, 8), arguments=PROGRAMMATIC | {"quantization": "int4_w4a8"}, programmatic=11
    ),
    "qwen3, weights in int4, programmatic": Case(
        "qwen3", (5,), (4, 8), arguments=PROGRAMMATIC | {"quantization": "int4"}, programmatic=11
    ),
    "qwen3, KV cache in int8, programmatic": Case(
        "qwen3", (7,), (5, 10), arguments=PROGRAMMATIC | {"kv_cache_dtype": "int8"}, programmatic=16
    ),
    "qwen3, a chunk of a prompt, programmatic": Case(
        "qwen3", (10,), (5, 13), bucket="tokens_32", arguments=PROGRAMMATIC, programmatic=14
    ),
    "qwen3-moe, a batch of 32, programmatic": Case(
        "qwen3-moe",
        (7, 7),
        (5, 10),
        bucket="decode_32",
        arguments=PROGRAMMATIC | {"bucket_sizes": (32,)},
        programmatic=23,
    ),
    "qwen3-moe, programmatic": Case("qwen3-moe", (7, 7), (5, 10), arguments=PROGRAMMATIC, programmatic=23),
    "qwen3-moe, W4A8, programmatic": Case(
        "qwen3-moe", (6, 5), (4, 9), arguments=PROGRAMMATIC | {"quantization": "int4_w4a8"}, programmatic=18
    ),
    "gpt-oss, weights in mxfp4, programmatic": Case(
        "gpt-oss", (7,), (4, 9), arguments=PROGRAMMATIC | {"quantization": "mxfp4"}, programmatic=13
    ),
    # Sums and joins over the ranks are a launch each.
    "qwen3, two ranks": Case("qwen3", (9,), (6, 17), arguments={"tensor_parallel_size": 2}),
    "qwen3, four ranks": Case("qwen3", (9,), (6, 17), arguments={"tensor_parallel_size": 4}),
    "qwen3, two ranks, exact sums": Case(  # four products and their stack, for each sum
        "qwen3", (17,), (6, 25), arguments={"tensor_parallel_size": 2, "tensor_parallel_exact": True}
    ),
    "qwen3, two ranks, a chunk of a prompt": Case("qwen3", (12,), (6, 20), "tokens_32", {"tensor_parallel_size": 2}),
    "qwen3, two ranks, weights in int8": Case(
        "qwen3", (9,), (5, 17), arguments={"tensor_parallel_size": 2, "quantization": "int8"}
    ),
    "qwen3-moe, two ranks": Case("qwen3-moe", (11, 9), (6, 18), arguments={"tensor_parallel_size": 2}),
    "qwen3, exact": Case("qwen3", (9,), (5, 12), arguments={"exact": True}),
}

# Rules that do not hold yet: how often they are broken. A rule is "copies" (kernels of torch's that copy),
# "addmm_with_matrix" (a product that adds a matrix), "dynamic_inputs" (inputs of a graph without a static address),
# "skip_reasons" (for no CUDA graph), "spilled" (kernels whose registers go to memory).
KNOWN: dict[str, dict[str, int]] = {
    # Rows that are no multiple of 16 bytes, in these small models alone: latents of queries, and what heads give.
    "deepseek-v3": {"copies": 2},
    "mistral4": {"copies": 2},
    "qwen3-moe, two ranks": {"copies": 2},  # of an expert's hidden rows, of 72 bytes in a rank
    # Likewise: the gates of the norms behind states, which lie beside b and a, or dt, of few heads.
    "qwen3.5": {"copies": 2, "spilled": 1},  # 8 bytes, with heads of 24 alone, which no model has
    "qwen3-next": {"copies": 3},
    "granite-hybrid": {"copies": 3},
    "nemotron-h": {"copies": 3},
    "qwen3.5, a chunk of a prompt": {"copies": 2},
    "qwen3.5-moe": {"copies": 3},
    "qwen3.5-moe, adapters of experts, 512 tokens": {"copies": 3},
    "granite-hybrid-moe, adapters of experts, 512 tokens": {"copies": 3},
    "granite-hybrid-moe": {"copies": 3},
    "nemotron-h-moe": {"copies": 3},
    "nemotron-h-moe, adapters of experts, 512 tokens": {"copies": 3},
}
