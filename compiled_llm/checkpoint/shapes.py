"""Published models by the numbers in their config.json, to be served with random weights where no checkpoint is there.

What a step costs depends on these numbers alone. ``--model`` and ``--shape`` are the flags that choose one.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config
from compiled_llm.api.config import EngineConfig

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "vocab_size": 151936, "rms_norm_eps": 1e-6,
}  # fmt: skip


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, tied: bool, **fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": heads, "tie_word_embeddings": tied, **fields}


_QWEN3_MOE = _QWEN3 | _sizes(
    2048, 6144, 48, 32, False, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_key_value_heads=4,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip
_LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "vocab_size": 128256, "rms_norm_eps": 1e-5,
}  # fmt: skip
_LATENT = {
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
        "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_NEMOTRON_H = _sizes(
    4096, 21504, 52, 32, False, architectures=["NemotronHForCausalLM"], model_type="nemotron_h",
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", head_dim=128,
    num_key_value_heads=8, mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
    max_position_embeddings=8192, vocab_size=131072, layer_norm_epsilon=1e-5,
)  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, True),
    "qwen3-4b": _QWEN3 | _sizes(2560, 9728, 36, 32, True),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32, False),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40, False),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64, False),
    "llama-3.1-8b": _LLAMA31 | _sizes(4096, 14336, 32, 32, False),
    "llama-3.1-70b": _LLAMA31 | _sizes(8192, 28672, 80, 64, False),
    "smollm2-135m": _sizes(
        576, 1536, 30, 9, True, architectures=["LlamaForCausalLM"], model_type="llama", num_key_value_heads=3,
        max_position_embeddings=8192, rope_theta=100000.0, vocab_size=49152, rms_norm_eps=1e-5,
    ),
    "qwen3-30b-a3b": _QWEN3_MOE,
    # Two layers of models with experts: what a layer costs shows beside a head that is read once for all of them.
    "qwen3-30b-a3b-2l": _QWEN3_MOE | {"num_hidden_layers": 2},
    "gpt-oss-20b-2l": _sizes(
        2880, 2880, 2, 64, False, architectures=["GptOssForCausalLM"], model_type="gpt_oss", head_dim=64,
        num_key_value_heads=8, num_local_experts=32, num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"], sliding_window=128, max_position_embeddings=131072,
        rms_norm_eps=1e-5, vocab_size=50272,  # a quarter: three engines with all 201,088 rows do not fit into 24 GB
    ),
    # One layer with an MLP and one with experts; of DeepSeek-V3's, which take 23 GB, a quarter, and of its vocabulary.
    "deepseek-v2-lite-2l": _sizes(
        2048, 10944, 2, 16, False, **_LATENT, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2",
        num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1,
        topk_group=1, topk_method="greedy", moe_intermediate_size=1408, q_lora_rank=None, vocab_size=102400,
    ),
    "deepseek-v3-2l": _sizes(
        7168, 18432, 2, 128, False, **_LATENT, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3",
        num_key_value_heads=128, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=2048, n_group=2, topk_group=1, routed_scaling_factor=2.5, q_lora_rank=1536,
        vocab_size=32320,
    ),
    "lfm2-1.2b": _sizes(
        2048, 12288, 16, 32, True, architectures=["Lfm2ForCausalLM"], model_type="lfm2", num_key_value_heads=8,
        full_attn_idxs=[2, 5, 8, 10, 12, 14], block_dim=2048, block_ff_dim=12288, conv_dim=2048, conv_L_cache=3,
        conv_bias=False, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256,
        max_position_embeddings=128000, rope_theta=1000000.0, vocab_size=65536, norm_eps=1e-5,
    ),
    "qwen3.5-0.8b": _sizes(
        1024, 3584, 24, 8, True, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", head_dim=256,
        num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6, max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        vocab_size=248320, rms_norm_eps=1e-6,
    ),
    "granite-4.0-h-1b": _sizes(
        1536, 4096, 40, 12, True, architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid",
        num_key_value_heads=4, shared_intermediate_size=4096, num_local_experts=0, num_experts_per_tok=0,
        mamba_n_heads=48, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
        mamba_conv_bias=True, mamba_proj_bias=False, position_embedding_type="nope",
        layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, attention_multiplier=0.0078125,
        embedding_multiplier=12, residual_multiplier=0.22, logits_scaling=6, max_position_embeddings=131072,
        vocab_size=100352, rms_norm_eps=1e-5,
    ),
    "nemotron-h-8b": _NEMOTRON_H,
    "nemotron-3-nano-6l": _NEMOTRON_H | _sizes(
        2688, 1856, 6, 32, False, hybrid_override_pattern="MEMEM*", num_key_value_heads=2, mamba_num_heads=64,
        n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5, max_position_embeddings=262144,
    ),
    "tiny": _QWEN3 | _sizes(128, 256, 2, 8, True, vocab_size=1000),
}  # fmt: skip
# As the published checkpoints: a config without a dtype means float32.
SHAPES: dict[str, dict[str, Any]] = {name: {"dtype": "bfloat16", **config} for name, config in _CONFIGS.items()}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """``--model DIR``, a checkpoint, or ``--shape NAME``, random weights of a known shape."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--model", metavar="DIR", help="a checkpoint's directory, GGUF file or hub id")
    group.add_argument(
        "--shape", choices=SHAPES, default="qwen3-0.6b", help="random weights, bfloat16 (default: qwen3-0.6b)"
    )


def engine_parser(program: str, description: str) -> FlagParser:
    """A parser with a flag for every engine argument, and ``--model`` or ``--shape``."""
    parser = FlagParser(prog=program, description=description, conflict_handler="resolve")
    add_engine_arguments(parser)
    add_model_arguments(parser)  # its --model replaces the engine's
    parser.conflict_handler = "error"
    return parser


@contextlib.contextmanager
def config_of(args: argparse.Namespace, **changes: Any) -> Iterator[EngineConfig]:
    """The engine arguments of the flags of ``engine_parser``; ``changes`` go before them."""
    with model_of(args) as model:
        given: dict[str, Any] = {**model, **changes}
        yield dataclasses.replace(engine_config(args), **given)


@contextlib.contextmanager
def model_of(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The engine arguments ``model`` and ``load_format`` of the flags; a shape's config is in a temporary directory."""
    if args.model is not None or args.shape is None:  # without both the bundled one
        yield {} if args.model is None else {"model": args.model, "load_format": "auto"}
        return
    with tempfile.TemporaryDirectory(prefix="compiled-llm-") as directory:
        # All that load_format="dummy" needs.
        Path(directory, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        yield {"model": directory, "load_format": "dummy"}
