"""Configs of well-known models some of whose layers keep a state, with the fields of the published ``config.json``.

Of most no copy was at hand: they are put together from what others quote of them.
"""

import math
from typing import Any

_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
_IGNORED_LFM2 = [
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "use_pos_enc",
]
_LFM25 = {
    name: value
    for name, value in _LFM2.items()
    if name not in ("block_ff_dim", "conv_dim_out", "rope_theta", "full_attn_idxs", "transformers_version")
} | {
    "full_attn_idxs": None,
    "intermediate_size": 12288,
    "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}

_QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_LFM2_MOE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
_GRANITE_350M: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 768,
    "initializer_range": 0.1,
    "intermediate_size": 2048,
    "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
    "logits_scaling": 3,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 32768,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.246,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}
# The language model of Granite 4.0 3B Vision, without a state.
_GRANITE_MICRO = _GRANITE_350M | {
    "embedding_multiplier": 12,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "layer_types": ["attention"] * 40,
    "logits_scaling": 10,
    "mamba_d_head": 40,
    "mamba_d_state": 256,
    "mamba_n_heads": 128,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rope_theta": 10000000,
    "shared_intermediate_size": 8192,
}
HYBRID: dict[str, tuple[dict[str, Any], list[str]]] = {
    "LFM2-8B-A1B": (_LFM2_MOE, []),
    "granite-4.0-h-350m": (_GRANITE_350M, ["normalization_function"]),
    "granite-4.0-micro": (_GRANITE_MICRO, ["normalization_function"]),
    "Qwen3-Next-80B-A3B-Instruct": (_QWEN3_NEXT, []),
    "Qwen3-Coder-Next": (_QWEN3_NEXT | {"rope_theta": 5000000}, []),
    "LFM2-1.2B": (_LFM2, _IGNORED_LFM2),
    "LFM2-350M": (
        _LFM2
        | {"block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "conv_dim_out": 1024, "hidden_size": 1024}
        | {"num_attention_heads": 16, "num_heads": 16},
        _IGNORED_LFM2,
    ),
    "LFM2.5-1.2B-Thinking": (_LFM25, [name for name in _IGNORED_LFM2 if name != "conv_dim_out"]),
}


def _pattern(num_layers: int) -> list[str]:
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]


_QWEN35_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3584,
    "layer_types": _pattern(24),
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 248320,
}
_QWEN35_MOE_TEXT: dict[str, Any] = {
    name: value for name, value in _QWEN35_TEXT.items() if name not in ("intermediate_size", "mlp_only_layers")
} | {
    "hidden_size": 2048,
    "layer_types": _pattern(40),
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}


def _whole(text: dict[str, Any]) -> dict[str, Any]:
    """The text's config inside of that with vision."""
    moe = "num_experts" in text
    return {
        "architectures": [f"Qwen3_5{'Moe' * moe}ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


WRAPPED_HYBRID: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": _whole(_QWEN35_TEXT),
    "Qwen3.5-9B": _whole(
        _QWEN35_TEXT
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "layer_types": _pattern(32)}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32}
        | {"tie_word_embeddings": False}
    ),
    "Qwen3.5-27B": _whole(
        _QWEN35_TEXT
        | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "layer_types": _pattern(64)}
        | {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48}
        | {"tie_word_embeddings": False}
    ),
    "Qwen3.5-35B-A3B": _whole(_QWEN35_MOE_TEXT),
    "Qwen3.5-397B-A17B": _whole(
        _QWEN35_MOE_TEXT
        | {"hidden_size": 4096, "num_hidden_layers": 60, "layer_types": _pattern(60), "num_attention_heads": 32}
        | {"moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64}
        | {"num_experts": 512, "num_experts_per_tok": 10}
    ),
}

# NVIDIA's Nemotron-H, Nemotron Nano 2 and Nemotron 3.
_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "initializer_range": 0.02,
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
_NANO_9B = {name: value for name, value in _8B.items() if name not in ("attention_head_dim", "time_step_limit")} | {
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
}
_NANO_30B = {name: value for name, value in _NANO_9B.items() if name != "rms_norm_eps"} | {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
_IGNORED = ["num_hidden_layers", "rms_norm_eps"]
NEMOTRON: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Nemotron-H-8B-Base-8K": (_8B, ["attention_head_dim", *_IGNORED]),
    "NVIDIA-Nemotron-Nano-9B-v2": (_NANO_9B, _IGNORED),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (_NANO_30B, ["norm_eps", "num_hidden_layers"]),
}
