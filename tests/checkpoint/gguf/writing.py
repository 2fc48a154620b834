"""GGUF files of small models with random weights, as llama.cpp's converter writes them."""

import functools
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.checkpoint.gguf.cutting import changed, cut, fused
from tests.families import strengthened

_SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "vocab_size": 307}
_SIZES |= {"hidden_size": 112, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
_LONG = [1.0 + i / 4 for i in range(16)]
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 64}
_BASE = {"rope_type": "default", "rope_theta": 5e4}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
_YARN |= {"beta_fast": 4.0, "beta_slow": 0.5}
_SAID_OF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 8}
_SAID_OF_YARN |= {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5}
_ROUTED = {"n_routed_experts": 4, **_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
_SAID_OF_ROUTED = {"expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1}
_SAID_OF_ROUTED |= {"expert_feed_forward_length": 48, "leading_dense_block_count": 1}
_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "q_lora_rank": None}
_LATENT |= {"num_key_value_heads": 4}
_SAID_OF_LATENT = {"attention.kv_lora_rank": 32, "rope.dimension_count": 8, "attention.head_count_kv": 1}
_SAID_OF_LATENT |= {"attention.key_length": 40, "attention.value_length": 32}
_SAID_OF_LATENT |= {"attention.key_length_mla": 24, "attention.value_length_mla": 20}
_DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "head_dim": 32}
_DELTA_NET |= {"linear_value_head_dim": 32, "linear_conv_kernel_dim": 3, "full_attention_interval": 2}
_DELTA_NET |= {"rope_parameters": {**_BASE, "partial_rotary_factor": 0.25}}
_SAID_OF_DELTA_NET = {"ssm.conv_kernel": 3, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4}
_SAID_OF_DELTA_NET |= {"ssm.inner_size": 128, "full_attention_interval": 2, "rope.dimension_count": 8}
_SHARED = {"num_experts": 3, **_EXPERTS, "shared_expert_intermediate_size": 40}
_SAID_OF_SHARED = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 48}
_SAID_OF_SHARED |= {"expert_shared_feed_forward_length": 40}
_SAID_OF_MAMBA = {"ssm.conv_kernel": 3, "ssm.state_size": 24, "ssm.group_count": 2, "ssm.time_step_rank": 14}
_SAID_OF_MAMBA |= {"ssm.inner_size": 224}
_GRANITE_HYBRID = {"mamba_n_heads": 14, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
_GRANITE_HYBRID |= {"mamba_d_conv": 3, "mamba_expand": 2, "shared_intermediate_size": 72}
_GRANITE_HYBRID |= {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "nope"}
_SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.5}
_SCALES |= {"logits_scaling": 8.0}
_SAID_OF_SCALES = {"embedding_scale": 12.0, "residual_scale": 0.25, "attention.scale": 0.5, "logit_scale": 8.0}
_NEMOTRON_H = {"mamba_num_heads": 14, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "conv_kernel": 3}
_NEMOTRON_H |= {"head_dim": 24, "layer_norm_epsilon": 1e-4}

# Name -> (architecture of the file, transformers' class, its config, keys of metadata beside the usual ones).
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {"head_dim": 32, "rope_parameters": _BASE}, {}),
    "llama with divisors": ("llama", "LlamaForCausalLM", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}, {}),
    "llama with biases": ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama in blocks": ("llama", "LlamaForCausalLM", {"hidden_size": 128}, {}),
    "mixtral": (
        "llama", "MixtralForCausalLM", {"num_local_experts": 3, "num_experts_per_tok": 2},
        {"expert_count": 3, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}, {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 24}, {}),
    "qwen3moe": (
        "qwen3moe", "Qwen3MoeForCausalLM", {"head_dim": 24, "num_experts": 3, **_EXPERTS, "norm_topk_prob": True},
        {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 48},
    ),
    "qwen3moe in blocks": (
        "qwen3moe", "Qwen3MoeForCausalLM",
        {"hidden_size": 128, "num_experts": 3, **_EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True},
        {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 64},
    ),
    "gemma2": (
        "gemma2", "Gemma2ForCausalLM",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 7, "tie_word_embeddings": True},
        {"attention.sliding_window": 7, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3", "Gemma3ForCausalLM",
        {
            **{"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 7, "tie_word_embeddings": True},
            "num_hidden_layers": 6, "layer_types": _WINDOWS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {"attention.sliding_window": 7, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": (
        "phi3", "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 64, "sliding_window": 9, "hidden_size": 128,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": _LONG,
                "attention_factor": 1.25,
            },
        },
        {"attention.sliding_window": 9, "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25},
    ),
    "granite": ("granite", "GraniteForCausalLM", {**_SCALES}, _SAID_OF_SCALES),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", {}, {}),
    "olmo3": (
        "olmo2", "Olmo3ForCausalLM", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
        {"attention.sliding_window": 5, "attention.sliding_window_pattern": [False, True]},
    ),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": None, "norm_epsilon": 1e-4}, {}),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 4, "use_sliding_window": False}, {}),
    "glm4": (
        "glm4", "Glm4ForCausalLM", {"head_dim": 28, "rope_parameters": {**_BASE, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 14},
    ),
    "mistral3": ("mistral3", "MistralForCausalLM", {"head_dim": 24, "sliding_window": None}, {}),
    "ministral3": (
        "mistral3", "Ministral3ForCausalLM",
        {
            "head_dim": 24,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
        },
        {**_SAID_OF_YARN, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5},
    ),
    "lfm2": (
        "lfm2", "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
    "lfm2moe": (
        "lfm2moe", "Lfm2MoeForCausalLM",
        {
            **{"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 3},
            **{**_EXPERTS, "tie_word_embeddings": True},
        },
        {
            **{"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "leading_dense_block_count": 1},
            **{"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 48},
        },
    ),
    "glm4moe": (
        "glm4moe", "Glm4MoeForCausalLM",
        {
            **{"head_dim": 28, "num_attention_heads": 6, **_ROUTED},  # as published, no divisor of the hidden size
            **{"routed_scaling_factor": 1.5, "rope_parameters": {**_BASE, "partial_rotary_factor": 0.5}},
        },
        {
            **{"rope.dimension_count": 14, **_SAID_OF_ROUTED, "expert_weights_scale": 1.5},
            **{"expert_weights_norm": True, "expert_group_count": 1, "expert_group_used_count": 1},
        },
    ),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM", {"head_dim": 24, "attention_bias": True}, {}),
    "gpt-oss": (
        "gpt-oss", "GptOssForCausalLM",
        {
            **{"head_dim": 32, "hidden_size": 128, "num_local_experts": 3, "num_experts_per_tok": 2},
            **{"sliding_window": 7, "rope_parameters": {**_YARN, "truncate": False}},
        },
        {"expert_count": 3, "expert_used_count": 2, "attention.sliding_window": 7, **_SAID_OF_YARN},
    ),
    "deepseek2": (
        "deepseek2", "DeepseekV2ForCausalLM",
        {**_ROUTED, **_LATENT, "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
        {**_SAID_OF_ROUTED, **_SAID_OF_LATENT, **_SAID_OF_YARN, "rope.scaling.yarn_log_multiplier": 0.07},
    ),
    "deepseek2 in blocks": (
        "deepseek2", "DeepseekV2ForCausalLM",
        {
            **{**_ROUTED, **_LATENT, "hidden_size": 128, "qk_nope_head_dim": 32, "v_head_dim": 32},
            "moe_intermediate_size": 64,
        },
        {
            **{**_SAID_OF_ROUTED, **_SAID_OF_LATENT, "attention.key_length_mla": 40},
            **{"attention.value_length_mla": 32, "expert_feed_forward_length": 64},
        },
    ),
    "deepseek2 as older files have it": (
        "deepseek2", "DeepseekV3ForCausalLM",
        {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1, "q_lora_rank": 24, "routed_scaling_factor": 1.5},
        {
            **{**_SAID_OF_ROUTED, "attention.kv_lora_rank": 32, "attention.q_lora_rank": 24},
            **{"rope.dimension_count": 8, "attention.key_length": 24, "attention.value_length": 20},
            **{"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_group_count": 2},
            "expert_group_used_count": 1,
        },
    ),
    "qwen3next": (
        "qwen3next", "Qwen3NextForCausalLM", {**_DELTA_NET, **_SHARED, "norm_topk_prob": True},
        {**_SAID_OF_DELTA_NET, **_SAID_OF_SHARED},
    ),
    "qwen35": ("qwen35", "Qwen3_5ForCausalLM", _DELTA_NET, _SAID_OF_DELTA_NET),
    "qwen35 in blocks": ("qwen35", "Qwen3_5ForCausalLM", {**_DELTA_NET, "hidden_size": 128}, _SAID_OF_DELTA_NET),
    "qwen35moe": (
        "qwen35moe", "Qwen3_5MoeForCausalLM", {**_DELTA_NET, **_SHARED}, {**_SAID_OF_DELTA_NET, **_SAID_OF_SHARED},
    ),
    "granitehybrid": (
        "granitehybrid", "GraniteMoeHybridForCausalLM",
        {**_GRANITE_HYBRID, **_SCALES, "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 72},
        {
            **_SAID_OF_MAMBA, **_SAID_OF_SCALES, "attention.head_count_kv": [0, 2], "feed_forward_length": 72,
            "rope.scaling.finetuned": False,
        },
    ),
    "granitehybrid with experts": (
        "granitehybrid", "GraniteMoeHybridForCausalLM",
        {
            **{**_GRANITE_HYBRID, **_SCALES, "num_local_experts": 3, "num_experts_per_tok": 2},
            **{"mamba_conv_bias": False, "mamba_proj_bias": True},
        },
        {
            **{**_SAID_OF_MAMBA, **_SAID_OF_SCALES, "attention.head_count_kv": [0, 2], "expert_count": 3},
            **{"expert_used_count": 2, "expert_shared_feed_forward_length": 72},
        },
    ),
    "nemotron_h": (
        "nemotron_h", "NemotronHForCausalLM",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention"], "use_bias": True},
        {
            **{**_SAID_OF_MAMBA, "block_count": 3, "attention.head_count_kv": [0, 0, 2]},
            "feed_forward_length": [0, 160, 0],
        },
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe", "NemotronHForCausalLM",
        {
            **{**_NEMOTRON_H, **_EXPERTS, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 56},
            **{"layers_block_type": ["linear_attention", "moe", "full_attention"], "use_conv_bias": False},
            **{"moe_latent_size": 40, "routed_scaling_factor": 1.5, "intermediate_size": 48},
        },
        {
            **{**_SAID_OF_MAMBA, "block_count": 3, "attention.head_count_kv": [0, 0, 2]},
            **{"feed_forward_length": [0, 48, 0], "expert_count": 4, "expert_used_count": 2},
            **{"expert_feed_forward_length": 48, "expert_shared_feed_forward_length": 56, "moe_latent_size": 40},
            **{"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_shared_count": 1},
        },
    ),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"n_inner": 160, "layer_norm_epsilon": 1e-4}, {}),
    "llama fused": ("llama", "LlamaForCausalLM", {"head_dim": 32}, {}),
}  # fmt: skip

OLD, FUSED = "deepseek2 as older files have it", ("llama fused", "qwen35moe")

# Parts of the hub's names -> GGUF's.
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embedding_norm": "token_embd_norm", "model.layers.": "blk.", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.c_fc": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.c_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias", "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    "feed_forward.experts.gate_proj": "ffn_gate_exps", "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps", "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "operator_norm": "attn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps", "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.": "ssm_",
    "mamba.": "ssm_", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "mixer.experts.up_proj": "ffn_up_exps", "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias", "mixer.gate": "ffn_gate_inp", "mixer.": "ssm_",
    "ssm_A_log": "ssm_a", "ssm_D": "ssm_d", "ssm_dt_bias": "ssm_dt.bias", "ssm_in_proj": "ssm_in",
    "ssm_out_proj": "ssm_out", "block_sparse_moe.router": "ffn_gate_inp", "model.embeddings": "token_embd",
    "model.norm_f": "output_norm", "norm": "attn_norm", "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm", "transformer.h.": "blk.",
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip
_USUAL = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_NORMS: dict[str, dict[str, str]] = {
    "gemma2": {**_USUAL, **_BEHIND, "pre_feedforward_layernorm": "ffn_norm"},
    "gemma3": {**_USUAL, **_BEHIND, "pre_feedforward_layernorm": "ffn_norm"},
    "olmo2": _BEHIND,
    "glm4moe": {**_USUAL, "post_attention_layernorm": "post_attention_norm"},
    "seed_oss": {**_USUAL, "post_attention_layernorm": "post_attention_norm"},
    "glm4": {**_USUAL, "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}
_NORMS |= dict.fromkeys(("gpt-oss", "qwen3next", "qwen35", "qwen35moe"), _NORMS["seed_oss"])


@functools.cache
def model_of(name: str) -> transformers.PreTrainedModel:
    """transformers' model, float32, seeded random weights; of ``MODELS``."""
    _, class_name, own, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, class_name).config_class(**{**_SIZES, **own})
    return strengthened(getattr(transformers, class_name)(config).eval())


@functools.cache
def hub_checkpoint(name: str) -> Path:
    """The model saved as the hub has it."""
    directory = Path(tempfile.mkdtemp(prefix="compiled-llm-test-"))
    model_of(name).save_pretrained(directory)
    return directory


def metadata_of(name: str) -> dict[str, Any]:
    """What a file of the model says of it, by whole keys."""
    architecture, _, own, more = MODELS[name]
    config = model_of(name).config
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
    }
    kinds = {"rms_norm_eps": "rms_", "norm_eps": "rms_", "layer_norm_epsilon": "", "norm_epsilon": ""}
    epsilon = next(field for field in kinds if hasattr(config, field))
    found[f"attention.layer_norm_{kinds[epsilon]}epsilon"] = getattr(config, epsilon)
    if "head_dim" in own:
        found["attention.key_length"] = own["head_dim"]
    if rope := getattr(config, "rope_parameters", None):
        found["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    found = {**{key: value for key, value in found.items() if value is not None}, **more}
    return {f"{architecture}.{key}": value for key, value in found.items()}


def tensors_of(name: str) -> dict[str, Tensor]:
    """The tensors of a file of the model, by GGUF's names, float32."""
    architecture = MODELS[name][0]
    model = model_of(name)
    state = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight" or not _is_tied(model)}
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        for part, tensor in cut(architecture, model.config, key, value, name == OLD).items():
            found[_gguf_name(architecture, part)] = changed(architecture, model.config, part, tensor)
    found = fused(found) if name in FUSED else found
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _divisors(rope, model.config.hidden_size // model.config.num_attention_heads)
    if rope.get("rope_type") == "longrope":
        for which in ("short", "long"):
            found[f"rope_factors_{which}.weight"] = torch.tensor(rope[f"{which}_factor"])
    return found


def _is_tied(model: transformers.PreTrainedModel) -> bool:
    return bool(model.config.tie_word_embeddings)


def _gguf_name(architecture: str, key: str) -> str:
    for part, name in {**_NORMS.get(architecture, _USUAL), **_NAMES}.items():
        behind = "" if part.endswith(".") else r"(?=\.(weight|bias)|$)"
        key = re.sub(rf"(^|(?<=\.)){re.escape(part)}{behind}", name, key)
    return key


def _divisors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Llama 3's scaling as the factor by which each frequency is divided."""
    frequencies = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind_of: Callable[[str], str] = lambda name: "F32",
    split: int = 0,
) -> Path:
    """Write a file, its tensors rounded to the kinds ``kind_of`` where a kind can hold them; returns the first file.

    Args:
        split: tensors of a file of several; 0: all are in one.
    """
    writer = gguf.GGUFWriter(None, architecture, split_max_tensors=split)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        array = tensor.numpy()
        kind = Kind[kind_of(name)] if tensor.dim() > 1 else Kind.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else min(path.parent.glob(f"{path.stem}-*.gguf"))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
