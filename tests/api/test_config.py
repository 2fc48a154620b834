"""EngineConfig and EngineLimits: what is refused, and what follows from the arguments."""

import itertools
import math

import pytest

from compiled_llm.api.config import EngineConfig, EngineLimits, StepDefaults
from compiled_llm.worker.device import STEP_DEFAULTS

DEFAULTS = StepDefaults(
    batched_tokens=512, beside_decodes=128, decode_buckets=(1, 8, 32), token_buckets=(1, 1 / 4, 1 / 16)
)


def limits(model_max_len: int = 256, **arguments) -> EngineLimits:
    return EngineLimits.resolve(EngineConfig(**arguments), model_max_len, DEFAULTS)


REFUSED: dict[str, list[object]] = {
    "model": ["", 5],
    "revision": ["v1", "", 1],  # of no model
    "tokenizer_revision": ["v1", 1],  # of no tokenizer
    "dtype": ["int8", ["float32"]],
    "device": ["tpu"],
    "load_format": ["pickle"],
    "kv_cache_dtype": ["int3"],
    "bucket_sizes": [(0, 8), (8, 8), (), "1,8", ("one",), (1.5,), (True,), 8, (2**30,)],
    "token_bucket_sizes": [(16, 16), (-16,)],
    "max_model_len": [0],
    "max_num_seqs": [-1],
    "max_num_batched_tokens": [1.5],
    "block_size": [0, 2048],
    "compile_workers": [-1, 1.5],
    "num_threads": [0, True],
    "num_kv_blocks": [0],
    "kv_cache_memory_bytes": [-1],
    "gpu_memory_utilization": [0, 1.1, math.nan],
    "enforce_eager": ["yes"],
    "seed": [-1],
    "swap_space_bytes": [-1],
    "preemption_mode": ["swap_out", None],
    "scheduling_policy": ["lifo"],
    "target_itl_ms": [0, math.nan, True],
    "enable_prefix_caching": [1, None],
    "enable_chunked_prefill": ["no"],
    "check_invariants": [None],
    "model_process": ["yes"],
    "tensor_parallel_size": [0, 65, 1.5, True],
    "tensor_parallel_exact": [1],
    "pipeline_parallel_size": [0, 65, 1.5, True],
    "enable_expert_parallel": [1, True],  # with one rank
    "async_scheduling": [1, "yes"],
    "compress_weights": [1, "lossless"],
    "keep_weights_twice": [1, None],
    "max_logprobs": [1001],
    "max_queued_requests": [0],
    "max_request_id_length": [0],
    "max_grammar_seconds": [0],
    "max_grammar_bytes": [5],
    "logits_transforms": ["json:dumps"],
    "max_loras": [8, 0],  # without enable_lora
    "max_lora_rank": [16, 513],
    "max_cpu_loras": [8],
    "max_lora_modules_to_save": [1, -1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=name):
            EngineConfig(**{name: value})


def test_messages_say_what_is_allowed_and_what_was_given() -> None:
    for arguments, message in [
        ({"model": ""}, "model must be a directory or a hub id as a non-empty str, given ''"),
        ({"dtype": ["float32"]}, r"dtype must be one of 'auto', .* given \['float32'\]"),
        ({"device": "tpu"}, "device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', given 'tpu'"),
        ({"bucket_sizes": ()}, "bucket_sizes must hold at least one size, given an empty list"),
        ({"bucket_sizes": (0, 8)}, "bucket_sizes must be a list of different integers from 1 to 1048576, given 0 in"),
        ({"bucket_sizes": (8, 8)}, r"bucket_sizes must be .* given duplicates in \[8, 8\]"),
        ({"block_size": 2048}, "block_size must be an integer from 1 to 1024, given 2048"),
        ({"gpu_memory_utilization": 1.5}, "must be a number above 0 and up to 1, given 1.5"),
        ({"target_itl_ms": 0}, "target_itl_ms must be a number of milliseconds above 0, or None, given 0"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, given 1"),
        ({"async_scheduling": "yes"}, "async_scheduling must be True, False or None, given 'yes'"),
        ({"compress_weights": "yes"}, "compress_weights must be True, False or None, given 'yes'"),
        (
            {"compress_weights": True, "keep_weights_twice": True},
            "compress_weights must be None with keep_weights_twice",
        ),
        ({"weights_path": "kept", "keep_weights_twice": True}, "weights_path must be None with keep_weights_twice"),
        ({"max_grammar_seconds": 0}, "max_grammar_seconds must be a number from 0.01 to 3600, given 0"),
        ({"logits_transforms": "json:dumps"}, "logits_transforms must be a list, given 'json:dumps'"),
    ]:
        with pytest.raises(ValueError, match=message):
            EngineConfig(**arguments)


def test_adapters() -> None:
    config = EngineConfig(enable_lora=True)
    assert (config.lora_slots, config.lora_rank, config.host_loras) == (8, 16, 8)
    assert limits(enable_lora=True).max_loras == 8
    assert limits().max_loras == 0
    config = EngineConfig(enable_lora=True, max_loras=2, max_lora_rank=64, max_cpu_loras=100)
    assert (config.lora_slots, config.lora_rank, config.host_loras) == (2, 64, 100)
    with pytest.raises(ValueError, match="model_process must be False with enable_lora=True"):
        EngineConfig(enable_lora=True, model_process=True)


def test_ranks() -> None:
    assert EngineConfig(wait_for_compile=False, tensor_parallel_size=2).waits_for_compile
    assert not EngineConfig(wait_for_compile=False, tensor_parallel_exact=True).waits_for_compile
    EngineConfig(tensor_parallel_size=2, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    drafts = {"method": "layer_skip", "num_speculative_tokens": 3}
    EngineConfig(tensor_parallel_size=2, speculative_config=drafts, enable_lora=True)
    EngineConfig(tensor_parallel_size=2, kv_host_bytes=2**20, kv_disk_path="x")
    for name in ({"tensor_parallel_size": 2}, {"tensor_parallel_exact": True}):
        with pytest.raises(ValueError, match="weights_path must be None with tensor_parallel"):
            EngineConfig(weights_path="x", **name)
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1, 2, 4 or 8 with tensor_parallel_exact=True"):
        EngineConfig(tensor_parallel_size=3, tensor_parallel_exact=True)


def test_what_stages_do_not_go_with_is_refused_by_name() -> None:
    assert EngineConfig(wait_for_compile=False, pipeline_parallel_size=2).waits_for_compile
    EngineConfig(pipeline_parallel_size=2, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    refused: dict[str, object] = {
        "enable_lora": True,
        "speculative_config": {"method": "layer_skip", "num_speculative_tokens": 3},
        "weights_path": "directory",
        "kv_host_bytes": 2**20,
        "async_scheduling": True,
        "tensor_parallel_size": 33,
    }
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"{name}|pipeline_parallel_size must be at most 1 with .*=33"):
            EngineConfig(**{"pipeline_parallel_size": 2, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [(-1,), (1, 1), (0.5,), (True,), "0", 0, ("0",), (1024,), None])
def test_layers_to_skip_are_different_integers(layers: object) -> None:
    with pytest.raises(ValueError, match="kv_cache_skip_layers must be a list of different integers from 0"):
        EngineConfig(kv_cache_dtype="int8", kv_cache_skip_layers=layers)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_layers_are_skipped_only_where_others_are_quantised(kv_cache_dtype: str) -> None:
    with pytest.raises(ValueError, match="kv_cache_skip_layers must be empty unless kv_cache_dtype is 'int8' or 'fp8'"):
        EngineConfig(kv_cache_dtype=kv_cache_dtype, kv_cache_skip_layers=(0,))
    assert EngineConfig(kv_cache_dtype="fp8", kv_cache_skip_layers=[3, 0]).kv_cache_skip_layers == (0, 3)


def test_swapping_needs_a_place_to_swap_to() -> None:
    with pytest.raises(ValueError, match="preemption_mode='swap' needs swap_space_bytes above 0, given 0"):
        EngineConfig(preemption_mode="swap")
    assert EngineConfig(preemption_mode="swap", swap_space_bytes=2**20).swap_space_bytes == 2**20
    assert EngineConfig(preemption_mode="recompute", swap_space_bytes=2**20).preemption_mode == "recompute"


def test_unknown_argument_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'bucket_size'.*bucket_sizes"):
        EngineConfig(bucket_size=(1, 8))


def test_defaults() -> None:
    resolved = limits()
    assert resolved.decode_bucket_sizes == (1, 8, 32)
    assert resolved.max_num_seqs == 32
    assert resolved.token_bucket_sizes == (32, 128, 512)
    assert (resolved.max_num_batched_tokens, resolved.max_tokens_beside_decodes) == (512, 128)
    assert resolved.max_model_len == 256
    assert limits(bucket_sizes=(200,)).max_tokens_beside_decodes == 200, "a token for each running request"
    assert limits(bucket_sizes=(1,), max_model_len=100).token_bucket_sizes == (25, 100)


def test_a_model_may_not_ask_for_any_length() -> None:
    """Its config.json may name a length whose tables alone would fill the memory; a user may."""
    with pytest.raises(ValueError, match=r"max_model_len must be given for this model: .* config\.json, 1000000000"):
        limits(model_max_len=10**9)
    assert limits(max_model_len=64, model_max_len=10**9).max_model_len == 64


def test_the_defaults_of_a_gpu_lose_no_more_than_half_to_padding() -> None:
    resolved = EngineLimits.resolve(EngineConfig(), 4096, STEP_DEFAULTS["cuda"])
    assert resolved.decode_bucket_sizes == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    tokens = resolved.token_bucket_sizes
    assert tokens == (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    assert max(large / small for small, large in itertools.pairwise(tokens)) <= 1.5
    on_a_cpu = EngineLimits.resolve(EngineConfig(), 4096, STEP_DEFAULTS["cpu"])
    assert on_a_cpu.decode_bucket_sizes == (1, 8, 32)
    assert on_a_cpu.token_bucket_sizes == (32, 64, 128, 256, 512, 1024, 2048)


def test_bucket_sizes_are_sorted_and_those_nothing_needs_left_out() -> None:
    assert limits(bucket_sizes=(32, 1, 8), max_num_seqs=5).decode_bucket_sizes == (1, 8)
    assert limits(token_bucket_sizes=(512, 64), max_num_batched_tokens=48).token_bucket_sizes == (64,)
    assert limits(token_bucket_sizes=(64, 192)).max_num_batched_tokens == 192


@pytest.mark.parametrize("arguments", [{"max_num_batched_tokens": 300}, {"token_bucket_sizes": (64, 300)}])
def test_a_step_of_a_size_that_is_given_is_no_smaller_beside_decodes(arguments: dict) -> None:
    assert limits(**arguments).max_tokens_beside_decodes is None


def test_whole_prompts_fit_without_chunked_prefill() -> None:
    resolved = limits(enable_chunked_prefill=False, max_num_seqs=1)
    assert resolved.max_num_batched_tokens >= resolved.max_model_len
    assert resolved.max_tokens_beside_decodes is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_model_len": 257}, "max_model_len must be at most"),
        ({"max_num_seqs": 64}, "max_num_seqs must be at most the largest of bucket_sizes, 32"),
        ({"max_num_batched_tokens": 31}, "max_num_batched_tokens must be at least max_num_seqs"),
        ({"max_num_batched_tokens": 100, "enable_chunked_prefill": False}, "without chunked prefill"),
        ({"max_num_batched_tokens": 100, "token_bucket_sizes": (64,)}, "token_bucket_sizes must be at least"),
    ],
)
def test_contradictions(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        limits(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization": "int3"}, "quantization must be one of 'int8', "),
        ({"quantization": "int4", "quantization_group_size": 48}, "quantization_group_size must be one of"),
        ({"quantization": "int8", "quantization_group_size": 32}, "quantization_group_size must be None unless"),
        ({"quantization": "int8", "quantization_skip": "down_proj"}, "quantization_skip must be a list"),
        ({"quantization": "int8", "quantization_skip": (1,)}, "quantization_skip must be a list"),
        ({"quantization_skip": ("down_proj",)}, "without quantization"),
        ({"quantization_head": "none"}, "quantization_head must be 'auto' without quantization"),
        ({"quantization": "int8", "quantization_embedding": "auto"}, "quantization_embedding must be one of"),
    ],
)
def test_quantization(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**arguments)
    EngineConfig(quantization="int4", quantization_group_size=64, quantization_skip=["down_proj"])
