"""Small configs of architectures without a file of their own: every structural field that they have is on."""

from typing import Any

_SMALL = {
    "hidden_size": 112, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 331, "max_position_embeddings": 512, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_ALTERNATING = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
_ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}
_GROUPS = {
    **_ROUTED, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.0, "first_k_dense_replace": 1,
}  # fmt: skip

# model_type -> its config, without what _SMALL has
_CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": {**_ROUTED, **_ALTERNATING, "head_dim": 24, "num_experts": 7, "num_dense_layers": 1, "mup_enabled": True},
    "apertus": {"rope_parameters": _LLAMA3_ROPE},
    "arcee": {"head_dim": 24},
    "biogpt": {"scale_embedding": True},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {**_ALTERNATING, "logit_scale": 0.25},
    "cohere2_moe": {**_ROUTED, **_ALTERNATING, "head_dim": 24, "num_experts": 7},
    "cwm": {**_ALTERNATING, "head_dim": 24, "rope_parameters": _LLAMA3_ROPE},
    "deepseek_v2": {**_MLA, **_GROUPS, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    "deepseek_v3": {**_MLA, **_GROUPS},
    "dots1": {**_GROUPS, "head_dim": 24},
    "ernie4_5": {"head_dim": 24, "use_bias": True},
    "ernie4_5_moe": {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 1},
    "exaone4": {**_ALTERNATING},
    "exaone_moe": {**_ROUTED, **_ALTERNATING, "num_experts": 8, "n_group": 4, "topk_group": 2},
    "flex_olmo": {**_ROUTED, "num_experts": 7},
    "gemma": {"head_dim": 24},
    "glm4_moe_lite": {**_MLA, **_GROUPS},
    "gpt_bigcode": {"n_embd": 112, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_inner": 96, "multi_query": True},
    "granitemoe": {"num_local_experts": 7, "num_experts_per_tok": 3, "attention_multiplier": 0.2},
    "granite_swa": {**_ALTERNATING, "attention_multiplier": 0.2, "residual_multiplier": 0.6},
    "helium": {"head_dim": 28},
    "hyperclovax": {},
    "jais2": {},
    "llama": {"rope_parameters": _LLAMA3_ROPE},
    "minicpm3": {**_MLA},
    "minimax_m2": {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 24},
    "nanochat": {},
    "olmo": {"clip_qkv": 0.5},
    "olmoe": {**_ROUTED, "num_experts": 7, "clip_qkv": 0.5},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 56, "do_layer_norm_before": False},
    "persimmon": {"partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phimoe": {"num_local_experts": 7, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {**_ROUTED, "num_experts": 7, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "seed_oss": {"head_dim": 24, "attention_bias": True},
    "solar_open": {**_GROUPS, "head_dim": 24},
    "starcoder2": {"sliding_window": 40},
    "vaultgemma": {**_ALTERNATING, "head_dim": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
}
CONFIGS = {name: {**_SMALL, **changes, "model_type": name} for name, changes in _CHANGES.items()}
