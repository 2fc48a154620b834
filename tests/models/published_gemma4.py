"""Configs of Gemma 4, as published: the language model is a part of each.

Those of 12B, 26B-A4B and 31B are quoted from copies of the files. E4B's is that of a finetune, without what its tools
added. E2B's differs from it in the fields that are given here, whose values other implementations quote.
"""

from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"
_TOKENS = {
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 258883,
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "video_token_id": 258884,
}
_WHOLE: dict[str, Any] = {
    **_TOKENS,
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "dtype": "bfloat16",
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "transformers_version": "5.5.0.dev0",
    "vision_config": {"model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}
_31B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "expert_intermediate_size": None,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 21504,
    "layer_types": [*[_SLIDING] * 5, _FULL] * 10,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "num_attention_heads": 32,
    "num_experts": None,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        _FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        _SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
_26B = {
    **{name: value for name, value in _31B.items() if name != "expert_intermediate_size"},
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": [*[_SLIDING] * 5, _FULL] * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
_12B = {
    **{name: value for name, value in _31B.items() if name not in ("dtype", "expert_intermediate_size")},
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "layer_types": [*[_SLIDING] * 5, _FULL] * 8,
    "model_type": "gemma4_unified_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
}
_E4B = {
    **_31B,
    "attention_k_eq_v": False,
    "hidden_size": 2560,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 10240,
    "layer_types": [*[_SLIDING] * 5, _FULL] * 7,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
}
_E2B = {
    **_E4B,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "layer_types": [*[_SLIDING] * 4, _FULL] * 7,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}

# Name -> config.json. Of these the language model alone is loaded, which is said in a warning.
GEMMA4: dict[str, dict[str, Any]] = {
    "gemma-4-E2B-it": {**_WHOLE, "text_config": _E2B},
    "gemma-4-E4B-it": {**_WHOLE, "text_config": _E4B},
    "gemma-4-12B-it": {
        **{
            name: value
            for name, value in _WHOLE.items()
            if name not in ("eoa_token_id", "vision_soft_tokens_per_image")
        },
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "audio_config": {
            "audio_embed_dim": 640,
            "audio_samples_per_token": 640,
            "hidden_size": 640,
            "initializer_range": 0.02,
            "model_type": "gemma4_unified_audio",
            "output_proj_dims": 640,
            "rms_norm_eps": 1e-06,
        },
        "model_type": "gemma4_unified",
        "text_config": _12B,
        "transformers_version": "5.10.0.dev0",
        "vision_config": {
            "initializer_range": 0.02,
            "mm_embed_dim": 3840,
            "mm_posemb_size": 1120,
            "model_patch_size": 48,
            "model_type": "gemma4_unified_vision",
            "num_soft_tokens": 280,
            "output_proj_dims": 3840,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "rms_norm_eps": 1e-06,
        },
    },
    "gemma-4-26B-A4B-it": {**_WHOLE, "text_config": _26B, "transformers_version": "5.5.0"},
    "gemma-4-31B-it": {**_WHOLE, "text_config": _31B},
}
