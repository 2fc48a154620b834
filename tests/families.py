"""Small configs of every supported family, and their transformers models with seeded random weights.

A new family is one more line in ``CONFIGS``: the equality, loader and graph-break tests then run for it.
"""

import copy
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

_SMALL = {
    "hidden_size": 112, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 307,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # random weights of the default 0.02 give logits too flat to tell tokens apart
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 8,
    "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
_TWO_ROPES = {
    "full_attention": {**_LLAMA3_ROPE, "rope_theta": 2000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_WINDOW_FULL = ["sliding_attention", "full_attention"]
_GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 2000.0, "partial_rotary_factor": 0.25, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

_DEEPSEEK = {
    **_SMALL, "num_attention_heads": 5, "num_key_value_heads": 5, "pad_token_id": 0, "kv_lora_rank": 32,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 12, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "rope_parameters": _YARN,
}  # fmt: skip


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def _config(model: str, *parts: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    """A model class of transformers, and the config of a small one."""
    found = dict(_SMALL)
    for part in (*parts, fields):
        found |= part
    return model, found


# name -> (transformers' model class, its config); odd shapes on purpose: head_dim is never hidden_size / num_heads, and
# vocabularies are no multiple of 64.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": _config("LlamaForCausalLM", _heads(4, 1, 32)),
    "llama-rope3-tied": _config(
        "LlamaForCausalLM", _heads(7, 1, 16), vocab_size=501, tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE,
    ),
    "llama-biases": _config("LlamaForCausalLM", _heads(2, 2, 64), attention_bias=True, mlp_bias=True),
    "seed-oss": _config("SeedOssForCausalLM", _heads(7, 1, 24), attention_out_bias=True, mlp_bias=True),
    "seed-oss-tied": _config("SeedOssForCausalLM", _heads(4, 2, 24), attention_bias=False, tie_word_embeddings=True),
    "mistral": _config("MistralForCausalLM", _heads(7, 1, 24), sliding_window=6),
    "ministral3": _config(
        "Ministral3ForCausalLM", _heads(7, 1, 24), pad_token_id=0,
        rope_parameters={**_YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.8},
    ),
    "smollm3": _config(
        "SmolLM3ForCausalLM", _heads(7, 1, 24), pad_token_id=0, no_rope_layers=[1, 0], use_sliding_window=True,
        sliding_window=6,
    ),
    "granite": _config(
        "GraniteForCausalLM", _heads(7, 1, 24), embedding_multiplier=3.0, attention_multiplier=0.11,
        residual_multiplier=0.6, logits_scaling=3.0,
    ),
    "phi3": _config(
        "Phi3ForCausalLM", _heads(7, 1, 16), pad_token_id=0, sliding_window=6, original_max_position_embeddings=256,
        partial_rotary_factor=0.75,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
            "short_factor": [1.0, 1.25, 1.5, 2.0, 3.0, 4.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
        },
    ),
    "qwen2": _config(
        "Qwen2ForCausalLM", _heads(14, 2, 24), use_sliding_window=True, sliding_window=6, max_window_layers=1,
    ),
    "qwen3": _config("Qwen3ForCausalLM", _heads(4, 1, 32), tie_word_embeddings=True),
    "qwen3-untied": _config(
        "Qwen3ForCausalLM", _heads(14, 2, 24), vocab_size=409, tie_word_embeddings=False, attention_bias=True,
    ),
    "mixtral": _config("MixtralForCausalLM", _heads(4, 2, 24), sliding_window=9, num_local_experts=5),
    "glm4-moe": _config(
        "Glm4MoeForCausalLM", _heads(4, 2, 24), num_hidden_layers=3, attention_bias=True, use_qk_norm=True,
        n_routed_experts=12, n_shared_experts=2, num_experts_per_tok=3, moe_intermediate_size=40,
        routed_scaling_factor=2.5, n_group=4, topk_group=2,
    ),
    "gpt-oss": _config(
        "GptOssForCausalLM", _heads(4, 2, 24), sliding_window=6, num_local_experts=5, num_experts_per_tok=2,
        swiglu_limit=0.9, swiglu_alpha=1.3,
    ),
    "qwen3-moe": _config(
        "Qwen3MoeForCausalLM", _heads(4, 1, 32), num_hidden_layers=3, mlp_only_layers=[1], num_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=72, norm_topk_prob=True,
    ),
    "gemma2": _config(
        # Random scaled embeddings that are the head too would repeat each token, in the other Gemmas as well.
        "Gemma2ForCausalLM", _heads(7, 1, 24), vocab_size=409, tie_word_embeddings=False, attention_bias=True,
        query_pre_attn_scalar=40, sliding_window=6, attn_logit_softcapping=3.0, final_logit_softcapping=8.0,
    ),
    "gemma3": _config(
        "Gemma3ForCausalLM", _heads(7, 1, 24), num_hidden_layers=3, vocab_size=409, tie_word_embeddings=False,
        query_pre_attn_scalar=40, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=_TWO_ROPES,
    ),
    "gemma4": _config(  # as E2B and E4B
        "Gemma4ForCausalLM", _heads(4, 2, 24), num_hidden_layers=4, vocab_size=409, tie_word_embeddings=False,
        sliding_window=6, layer_types=_WINDOW_FULL * 2, global_head_dim=48, num_kv_shared_layers=2,
        use_double_wide_mlp=True, hidden_size_per_layer_input=20, vocab_size_per_layer_input=409,
        rms_norm_eps=0.05,  # of norms behind which a scale would not matter
        final_logit_softcapping=8.0, rope_parameters=_GEMMA4_ROPES,
    ),
    "gemma4-moe": _config(  # as 26B-A4B, and 31B besides its experts
        "Gemma4ForCausalLM", _heads(4, 4, 24), vocab_size=409, tie_word_embeddings=False, sliding_window=6,
        layer_types=_WINDOW_FULL, attention_bias=True, attention_k_eq_v=True, global_head_dim=48,
        num_global_key_value_heads=2, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=7,
        top_k_experts=3, moe_intermediate_size=40, rms_norm_eps=0.05, rope_parameters=_GEMMA4_ROPES,
    ),
    "olmo2": _config("Olmo2ForCausalLM", _heads(7, 1, 16), attention_bias=True, rope_parameters=_LLAMA3_ROPE),
    "olmo3": _config(
        "Olmo3ForCausalLM", _heads(4, 2, 28), num_hidden_layers=3, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=_TWO_ROPES,
    ),
    "glm": _config("GlmForCausalLM", _heads(4, 1, 24), attention_bias=False, rms_norm_eps=1e-5, pad_token_id=0),
    "starcoder2": _config(
        "Starcoder2ForCausalLM", _heads(6, 2, 24), sliding_window=6,
        norm_epsilon=0.05,  # which matters beside variances of this model
        tie_word_embeddings=False,
    ),
    "starcoder2-without-biases": _config(
        "Starcoder2ForCausalLM", _heads(7, 1, 16), use_bias=False, hidden_act="gelu",
    ),
    "gpt-neox": _config("GPTNeoXForCausalLM", num_attention_heads=7, rotary_pct=0.5, rotary_emb_base=100),
    "gpt-neox-in-turn": _config(
        "GPTNeoXForCausalLM", num_attention_heads=14, rotary_pct=1.0, use_parallel_residual=False,
        attention_bias=False, hidden_act="gelu_fast", tie_word_embeddings=True,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "n_embd": 112, "n_head": 7, "n_layer": 2, "n_inner": 160, "n_positions": 256, "vocab_size": 307,
            "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "deepseek-v3": _config(
        "DeepseekV3ForCausalLM", _DEEPSEEK, q_lora_rank=24, n_group=4, topk_group=2, attention_bias=True,
    ),
    "deepseek-v3-halves": _config(
        "DeepseekV3ForCausalLM", _DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1, rope_interleave=False,
    ),
    "deepseek-v2": _config(
        "DeepseekV2ForCausalLM", _DEEPSEEK, num_attention_heads=7, num_key_value_heads=7, q_lora_rank=None,
    ),
    "mistral4": _config(
        "Mistral4ForCausalLM", _DEEPSEEK, q_lora_rank=24, first_k_dense_replace=0,
        rope_parameters={**_YARN, "llama_4_scaling_beta": 0.8},
    ),
    "glm4": _config("Glm4ForCausalLM", _heads(7, 1, 16), pad_token_id=0),
}  # fmt: skip

_HYBRID = {"num_hidden_layers": 4, "max_position_embeddings": 640, "initializer_range": 0.12}
_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 14, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 3,
    "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 1.6,
}  # fmt: skip
_SHARED_EXPERT = {
    "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 56, "shared_expert_intermediate_size": 72,
}  # fmt: skip
_NEMOTRON = {
    "layer_norm_epsilon": 0.05, "mamba_num_heads": 14, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24,
    "conv_kernel": 3,
}  # fmt: skip
# Of families some of whose layers keep a state of a fixed size.
HYBRID_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": _config(
        "Lfm2ForCausalLM", _HYBRID, _heads(7, 1, 24), hidden_size=84, norm_eps=0.05,
        layer_types=["conv", "full_attention", "conv", "conv"], conv_L_cache=4, conv_bias=True, block_multiple_of=24,
        block_ffn_dim_multiplier=1.1, tie_word_embeddings=False,
    ),
    "qwen3-next": _config(
        "Qwen3NextForCausalLM", _HYBRID, _heads(7, 1, 32), _DELTA_NET, _SHARED_EXPERT, rms_norm_eps=0.05,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        mlp_only_layers=[2], attention_bias=True, norm_topk_prob=False,
    ),
    "qwen3.5": _config(
        "Qwen3_5ForCausalLM", _HYBRID, _heads(6, 2, 24), _DELTA_NET, vocab_size=501, rms_norm_eps=0.01,
        full_attention_interval=2, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeForCausalLM",
        {
            **{name: value for name, value in _SMALL.items() if name != "intermediate_size"}, **_HYBRID,
            **_heads(7, 1, 32), **_DELTA_NET, **_SHARED_EXPERT, "rms_norm_eps": 0.01,
        },
    ),
    "lfm2-moe": _config(
        "Lfm2MoeForCausalLM", _HYBRID, num_attention_heads=4, num_key_value_heads=2, norm_eps=0.05,
        layer_types=["conv", "conv", "full_attention", "conv"], num_dense_layers=1, num_experts=9,
        num_experts_per_tok=3, moe_intermediate_size=56, routed_scaling_factor=1.7,
    ),
    "granite-hybrid": _config(
        "GraniteMoeHybridForCausalLM", _HYBRID, _MAMBA, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=0.05, num_local_experts=0, shared_intermediate_size=72, tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
    "granite-hybrid-moe": _config(
        "GraniteMoeHybridForCausalLM", _HYBRID, _MAMBA, intermediate_size=56, num_attention_heads=4,
        num_key_value_heads=1, rms_norm_eps=0.05, num_local_experts=6, num_experts_per_tok=2,
        shared_intermediate_size=72, position_embedding_type="rope", mamba_conv_bias=False, mamba_proj_bias=True,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    ),
    "nemotron-h": _config(
        "NemotronHForCausalLM", _HYBRID, _NEMOTRON, _heads(7, 1, 24), num_hidden_layers=6,
        layers_block_type=[
            "linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention",
        ],
        use_bias=True, mlp_bias=True,
    ),
    "nemotron-h-moe": _config(
        "NemotronHForCausalLM", _HYBRID, _NEMOTRON, _heads(4, 2, 32), num_hidden_layers=7,
        layers_block_type=[
            "linear_attention", "moe", "full_attention", "moe", "linear_attention", "linear_attention", "moe",
        ],
        use_conv_bias=False, n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=56, moe_latent_size=48, n_group=3, topk_group=2,
        routed_scaling_factor=1.7,
    ),
    "lfm2-tied": _config(
        "Lfm2ForCausalLM", _HYBRID, num_attention_heads=4, num_key_value_heads=2, vocab_size=501, full_attn_idxs=[1],
        block_auto_adjust_ff_dim=False,
    ),
}  # fmt: skip

EVERY_CONFIG = {**CONFIGS, **HYBRID_CONFIGS}

# Of compiled engines of the demo model in bfloat16: those of README's first command. The ordinary run compiles no other
# engine as a whole, since that takes 45 s of processor time; the cache of compiled graphs is shared by all tests.
COMPILED_SIZES: dict[str, Any] = {"bucket_sizes": (1, 8, 32)}


def transformers_model(name: str) -> transformers.PreTrainedModel:
    """transformers' model of a config, float32, seeded random weights (biases and norms too)."""
    class_name, fields = EVERY_CONFIG[name]
    config = getattr(transformers, class_name).config_class(**copy.deepcopy(fields))  # it fills in their dictionaries
    torch.manual_seed(0)
    return strengthened(getattr(transformers, class_name)(config).eval())


def strengthened(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The model, with biases and norms that matter: transformers begins with zeros and ones."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
            elif any(part in parameter_name for part in ("norm", ".ln_", "scale")):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        keep_time_steps(model)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
            elif buffer_name.endswith("layer_scalar"):
                buffer.add_(torch.randn_like(buffer), alpha=0.2)
    return model


def keep_time_steps(model: transformers.PreTrainedModel) -> None:
    """Put the limits of time steps right.

    transformers' Nemotron-H takes time_step_min for the first of them, which neither the model's own code does nor a
    decode of transformers' (its pull request 48989).
    """
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(model.config.time_step_limit)


def logits_of(model: transformers.PreTrainedModel, prompts: Tensor) -> Tensor:
    """Those of all tokens. Layers with a state go from token to token: in chunks they lose digits of float32."""
    code = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if hasattr(code, "torch_chunk_gated_delta_rule"):
            patch.setattr(code, "torch_chunk_gated_delta_rule", code.torch_recurrent_gated_delta_rule)
        return model(prompts).logits


@functools.cache
def checkpoint(name: str) -> Path:
    """The same model saved to a directory that lives as long as the test run."""
    directory = Path(tempfile.mkdtemp(prefix="compiled-llm-test-"))
    transformers_model(name).save_pretrained(directory)
    return directory
