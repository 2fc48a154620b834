"""Configs of well-known models some of whose layers keep a state, with the fields of the published ``config.json``.

Of most no copy was at hand: they are put together from what others quote of them.
"""

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

HYBRID: dict[str, tuple[dict[str, Any], list[str]]] = {
    "LFM2-1.2B": (_LFM2, _IGNORED_LFM2),
    "LFM2-350M": (
        _LFM2
        | {"block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "conv_dim_out": 1024, "hidden_size": 1024}
        | {"num_attention_heads": 16, "num_heads": 16},
        _IGNORED_LFM2,
    ),
    "LFM2.5-1.2B-Thinking": (_LFM25, [name for name in _IGNORED_LFM2 if name != "conv_dim_out"]),
}
