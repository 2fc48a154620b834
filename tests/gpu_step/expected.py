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


BATCH_OF_64 = {"bucket_sizes": (64,), "token_bucket_sizes": (64,), "max_num_batched_tokens": 64}


def _case(
    name: str,
    launches_per_layer: tuple[int, ...],
    around: tuple[int, int],
    bucket: str = "decode_2",
    programmatic: int = 0,
    **arguments: Any,
) -> tuple[str, Case]:
    """The family is what ``name`` begins with; ``arguments``: of the engine."""
    if programmatic:
        arguments["cuda_graphs"] = "programmatic"
    return name, Case(name.split(",")[0], launches_per_layer, around, bucket, arguments, programmatic)


STEPS = dict(
    [
        _case("llama", (7,), (5, 10)),
        _case("llama, a chunk of a prompt", (10,), (5, 13), "tokens_32"),
        _case("qwen3-moe", (7, 7), (5, 10)),
        _case("llama, a batch of 64", (8,), (5, 12), "decode_64", **BATCH_OF_64),
        _case("llama-rope3-tied", (7,), (5, 10)),
        _case("llama-biases", (7,), (5, 10)),
        _case("llama-biases, a request alone", (7,), (5, 10), "decode_1", bucket_sizes=(1,)),
        _case("mistral", (7,), (5, 10)),
        _case("ministral3", (7,), (6, 10)),
        _case("smollm3", (8,), (5, 10)),
        _case("granite", (7,), (5, 11)),
        _case("phi3", (7,), (5, 10)),
        _case("qwen2", (8,), (5, 10)),
        _case("seed-oss", (7,), (5, 10)),
        _case("seed-oss-tied", (7,), (5, 10)),
        _case("qwen3", (7,), (5, 10)),
        _case("qwen3-untied", (7,), (5, 10)),
        _case("mixtral", (7,), (5, 10)),
        _case("glm4-moe", (7, 9), (5, 12)),
        _case("gpt-oss", (8,), (5, 10)),
        _case("gemma2", (8,), (5, 12)),
        _case("gemma3", (8, 7), (6, 11)),
        _case("gemma4", (17, 11, 11), (6, 16)),  # six launches of the first layer: the tokens' embeddings of all layers
        _case("gemma4-moe", (12,), (6, 15)),  # one of them: the angles of layers without a window
        _case("olmo2", (8,), (5, 11)),
        _case("olmo3", (9, 8), (6, 11)),
        _case("glm", (7,), (5, 10)),
        _case("starcoder2", (7,), (5, 10)),
        _case("starcoder2-without-biases", (7,), (5, 10)),
        _case("gpt-neox", (7,), (5, 10)),
        _case("gpt-neox-in-turn", (7,), (5, 10)),
        _case("gpt2", (7,), (4, 10)),
        _case("glm4", (7,), (5, 11)),
        _case("llama, KV cache in int8", (7,), (5, 10), kv_cache_dtype="int8"),
        _case("llama, KV cache in fp8", (7,), (5, 10), kv_cache_dtype="fp8"),
        _case("qwen3, weights in int8", (5,), (4, 8), quantization="int8"),
        _case("qwen3, weights in int4", (5,), (4, 8), quantization="int4"),
        _case("qwen3, weights in fp8", (5,), (4, 8), quantization="fp8"),
        _case("qwen3, weights in mxfp4", (5,), (4, 8), quantization="mxfp4"),
        _case("qwen3, W4A8", (5,), (4, 8), quantization="int4_w4a8"),
        _case("qwen3, W8A8", (5,), (4, 8), quantization="int8_w8a8"),
        _case("qwen3, W8A8, a chunk of a prompt", (12,), (5, 14), "tokens_32", quantization="int8_w8a8"),
        # What adapters change is in the launches of the products.
        _case("qwen3, adapters", (7,), (5, 10), "decode_2_lora", enable_lora=True),
        _case("qwen3, adapters, a chunk of a prompt", (10,), (5, 13), "tokens_32", enable_lora=True),
        # Two launches more for each linear layer, of which there are four.
        _case("qwen3, adapters, a batch of 64", (16,), (7, 18), "decode_64_lora", enable_lora=True, **BATCH_OF_64),
        _case("qwen3-moe, adapters", (7, 7), (5, 10), "decode_2_lora", enable_lora=True),
        # Two more for each of the two layers, two that find the rows' slots and inputs; gate and sum are by themselves.
        _case(
            "qwen3-moe, adapters of experts",
            (15, 7),
            (5, 18),
            "decode_2_lora",
            enable_lora=True,
            lora_target_modules=["all-linear", "experts"],
        ),
        # Two more for each of the heads' two layers, and a copy of queries.
        _case("deepseek-v2, adapters", (15,), (10, 18), "decode_2_lora", enable_lora=True),
        _case("qwen3, adapters, none used", (7,), (5, 10), enable_lora=True),
        _case("qwen3, adapters, programmatic", (7,), (5, 10), "decode_2_lora", programmatic=16, enable_lora=True),
        _case("qwen3, adapters, weights in int8", (5,), (4, 8), "decode_2_lora", enable_lora=True, quantization="int8"),
        _case("qwen3, adapters, weights in int4", (5,), (4, 8), "decode_2_lora", enable_lora=True, quantization="int4"),
        _case("qwen3, adapters, weights in fp8", (5,), (4, 8), "decode_2_lora", enable_lora=True, quantization="fp8"),
        _case(
            "qwen3, adapters, weights in int8_w8a8",
            (5,),
            (4, 8),
            "decode_2_lora",
            enable_lora=True,
            quantization="int8_w8a8",
        ),
        _case("llama, adapters, weights in int8", (5,), (4, 8), "decode_2_lora", enable_lora=True, quantization="int8"),
        _case("llama, adapters", (7,), (5, 10), "decode_2_lora", enable_lora=True),
        _case("qwen3-moe, a chunk of a prompt", (10, 10), (5, 13), "tokens_32"),
        _case("qwen3-moe, a batch of 64", (7, 8), (5, 10), "decode_64", **BATCH_OF_64),
        _case("qwen3-moe, exact", (11, 9), (5, 14), exact=True),
        _case("qwen3-moe, weights in int8", (6, 5), (4, 9), quantization="int8"),
        _case("qwen3-moe, W4A8", (6, 5), (4, 9), quantization="int4_w4a8"),
        _case("gemma2, weights in int8", (8,), (4, 11), quantization="int8"),
        _case("gemma3, W8A8", (8, 7), (5, 10), quantization="int8_w8a8"),
        _case("olmo2, weights in int8", (8,), (5, 10), quantization="int8"),
        _case("glm4, weights in int8", (7,), (4, 10), quantization="int8"),
        _case("granite, weights in int8", (5,), (4, 10), quantization="int8"),
        _case("starcoder2, weights in int8", (7,), (5, 10), quantization="int8"),
        _case("gpt-neox, weights in int8", (7,), (5, 10), quantization="int8"),
        _case("gpt-oss, weights in mxfp4", (7,), (4, 9), quantization="mxfp4"),
        _case("deepseek-v2", (10,), (6, 14)),
        _case("deepseek-v3", (13,), (9, 14)),
        _case("deepseek-v3-halves", (10,), (6, 14)),
        _case("mistral4", (16,), (11, 14)),
        _case("deepseek-v2, a chunk of a prompt", (11,), (6, 15), "tokens_32"),
        _case("deepseek-v2, KV cache in int8", (10,), (6, 14), kv_cache_dtype="int8"),
        _case("deepseek-v2, exact", (11,), (6, 18), exact=True),
        _case("lfm2", (8, 7, 7), (4, 10)),
        _case("qwen3.5", (11, 8, 10), (4, 11)),
        _case("qwen3-next", (15, 12, 10), (4, 17)),
        _case("granite-hybrid", (11, 7, 10), (3, 14)),
        _case("nemotron-h", (10, 8, 7), (3, 10)),
        _case("qwen3.5, a chunk of a prompt", (14, 11, 12), (3, 14), "tokens_32"),
        _case("qwen3.5-moe", (14, 14, 15), (4, 15)),
        _case("lfm2-moe", (7, 8, 7), (4, 10)),
        _case("granite-hybrid-moe", (13, 14, 10), (4, 17)),
        _case("lfm2-tied", (8, 7, 7), (4, 10)),
        _case("nemotron-h-moe", (17, 13, 7), (3, 20)),
        _case("qwen3, programmatic", (7,), (5, 10), programmatic=16),
        # Its heads have 64 elements, for which there is a kernel of its own.
        _case(
            "llama-biases, a request alone, programmatic", (7,), (5, 10), "decode_1", programmatic=16, bucket_sizes=(1,)
        ),
        _case(
            "llama-biases, a request alone, KV cache in int8, programmatic",
            (7,),
            (5, 10),
            "decode_1",
            programmatic=16,
            bucket_sizes=(1,),
            kv_cache_dtype="int8",
        ),
        _case("qwen3, W4A8, programmatic", (5,), (4, 8), programmatic=11, quantization="int4_w4a8"),
        _case("qwen3, weights in int4, programmatic", (5,), (4, 8), programmatic=11, quantization="int4"),
        _case("qwen3, KV cache in int8, programmatic", (7,), (5, 10), programmatic=16, kv_cache_dtype="int8"),
        _case("qwen3, a chunk of a prompt, programmatic", (10,), (5, 13), "tokens_32", programmatic=14),
        _case(
            "qwen3-moe, a batch of 32, programmatic", (7, 7), (5, 10), "decode_32", programmatic=23, bucket_sizes=(32,)
        ),
        _case("qwen3-moe, programmatic", (7, 7), (5, 10), programmatic=23),
        _case("qwen3-moe, W4A8, programmatic", (6, 5), (4, 9), programmatic=18, quantization="int4_w4a8"),
        _case("gpt-oss, weights in mxfp4, programmatic", (7,), (4, 9), programmatic=13, quantization="mxfp4"),
        # Sums and joins over the ranks are taken to be a launch each.
        _case("qwen3, two ranks", (9,), (6, 17), tensor_parallel_size=2),
        _case("qwen3, four ranks", (9,), (6, 17), tensor_parallel_size=4),
        _case(
            "qwen3, two ranks, exact sums", (17,), (6, 25), tensor_parallel_size=2, tensor_parallel_exact=True
        ),  # four products and their stack, for each sum
        _case("qwen3, two ranks, a chunk of a prompt", (12,), (6, 20), "tokens_32", tensor_parallel_size=2),
        _case("qwen3, two ranks, weights in int8", (9,), (5, 17), tensor_parallel_size=2, quantization="int8"),
        _case("qwen3-moe, two ranks", (11, 9), (6, 18), tensor_parallel_size=2),
        _case("qwen3, exact", (9,), (5, 12), exact=True),
    ]
)

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
    "granite-hybrid-moe": {"copies": 3},
    "nemotron-h-moe": {"copies": 3},
}
