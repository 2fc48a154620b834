"""Configs of well-known checkpoints: each file of ``published/`` is a published ``config.json``.

Of some no copy was at hand: Qwen3-Coder-480B, Qwen3-235B-A22B, gpt-oss-safeguard and Mistral Small 4 are put together
from what is known, and so is what DeepSeek-V2, R1 and V3.1 differ in. DeepSeek's own files of V3 are in fp8; these are
those of the same weights in bfloat16. The published lists of Phi-3's LongRoPE factors rise from 1 to about 65; these
have their length.
"""

import json
from pathlib import Path
from typing import Any

# The first config of an architecture is its smallest one; the last one is served by the ordinary run of the tests.
_NAMES = {
    "dense": """
        llama-7b Llama-2-7b vicuna-7b-v1.5 deepseek-coder-1.3b open_llama_3b Yi-6B TinyLlama-1.1B-Chat-v1.0
        Meta-Llama-3-8B Llama-3.1-8B-Instruct Llama-3.2-1B unsloth-Llama-3.2-1B DeepSeek-R1-Distill-Llama-8B
        SmolLM-135M SmolLM2-135M SmolLM2-360M-Instruct SmolLM2-1.7B-Instruct Qwen3-0.6B Qwen3-1.7B Qwen3-4B
        Qwen3-8B Qwen3-8B_as_transformers_4.57_saves_it Qwen3-0.6B_as_transformers_5_saves_it
        Qwen3-8B_with_a_window Qwen3-8B_with_YaRN gemma-2-2b gemma-2-9b Mistral-7B-v0.1 Mistral-7B-Instruct-v0.3
        Mistral-Nemo-Base-2407 Mistral-Small-24B-Instruct-2501 Ministral-8B-Instruct-2410
        Ministral-3-3B_text_config Ministral_with_two_kinds_of_layer SmolLM3-3B granite-3.1-2b-instruct
        granite-3.3-8b-instruct Phi-3-mini-4k-instruct Phi-3-mini-128k-instruct phi-4 Phi-4-mini-instruct
        Seed-OSS-36B-Instruct Qwen2.5-0.5B Qwen2.5-7B-Instruct Qwen2.5-7B-Instruct_with_YaRN
        DeepSeek-R1-Distill-Qwen-1.5B gemma-3-270m gemma-3-1b-it OLMo-2-1124-7B OLMo-2-0425-1B OLMo-2-0325-32B
        glm-4-9b-chat-hf GLM-4-9B-0414 GLM-4-32B-0414 Olmo-3-1025-7B Olmo-3-1125-32B starcoder2-3b starcoder2-7b
        starcoder2-15b pythia-160m pythia-6.9b gpt-neox-20b gpt2 gpt2-xl distilgpt2 gemma-2-27b
        granite-3.3-2b-instruct Ministral-3-8B_text_config glm-4-9b-hf glm-4-9b-chat-1m-hf GLM-Z1-9B-0414
        Olmo-3-7B-Instruct
    """,
    "moe": """
        Qwen3-30B-A3B Qwen3-30B-A3B-Instruct-2507 Qwen3-235B-A22B Qwen3-Coder-480B-A35B-Instruct
        Mixtral-8x7B-v0.1 Mixtral-8x22B-v0.1 Mixtral-8x22B-Instruct-v0.1 GLM-4.5 GLM-4.5-Air GLM-4.6 GLM-4.7
        gpt-oss-20b gpt-oss-120b gpt-oss-safeguard-20b gpt-oss-20b_in_bfloat16
    """,
    "latent": """
        DeepSeek-V3 DeepSeek-R1 DeepSeek-V3.1 DeepSeek-V2 DeepSeek-V2-Lite DeepSeek-V2-Lite-Chat
        DeepSeek-Coder-V2-Lite-Instruct Mistral-Small-4
    """,
    "hybrid": """
        LFM2-8B-A1B granite-4.0-h-350m granite-4.0-micro Qwen3-Next-80B-A3B-Instruct Qwen3-Coder-Next LFM2-1.2B
        LFM2-350M LFM2.5-1.2B-Thinking Nemotron-H-8B-Base-8K NVIDIA-Nemotron-Nano-9B-v2
        NVIDIA-Nemotron-3-Nano-30B-A3B
    """,
    "wrapped": """
        gemma-3-4b-it gemma-3-27b-it Mistral-Small-3.1-24B-Instruct-2503 Ministral-3-3B
    """,
    "gemma4": """
        gemma-4-E2B-it gemma-4-E4B-it gemma-4-12B-it gemma-4-26B-A4B-it gemma-4-31B-it
    """,
    "wrapped_hybrid": """
        Qwen3.5-0.8B Qwen3.5-9B Qwen3.5-27B Qwen3.5-35B-A3B Qwen3.5-397B-A17B
    """,
}
# Fields that transformers ignores -> the names of the configs that have them.
_IGNORED = {
    "max_sequence_length": "llama-7b",
    "max_length": "vicuna-7b-v1.5",
    "unsloth_fixed": "unsloth-Llama-3.2-1B",
    "rope_interleaved": "SmolLM-135M",
    "is_llama_config rope_interleaved": "SmolLM2-135M",
    "is_llama_config rope_interleaved transformers.js_config": "SmolLM2-360M-Instruct",
    "transformers.js_config": "SmolLM2-1.7B-Instruct",
    "cache_implementation hidden_act": "gemma-2-2b",
    "cache_implementation hidden_act sliding_window_size": "gemma-2-9b gemma-2-27b",
    "attention_bias auto_map": "Phi-3-mini-4k-instruct Phi-3-mini-128k-instruct",
    "attention_bias": "phi-4",
    "attention_bias auto_map full_attn_mod interpolate_factor lm_head_bias mlp_bias": "Phi-4-mini-instruct",
    "use_mrope": "Qwen2.5-0.5B DeepSeek-R1-Distill-Qwen-1.5B",
    "cache_implementation": "gemma-3-1b-it",
    "mlp_type norm_type": "starcoder2-3b starcoder2-7b",
    "mlp_type norm_type rms_norm_eps": "starcoder2-15b",
    "attention_probs_dropout_prob hidden_dropout_prob": "gpt-neox-20b",
    "n_ctx task_specific_params": "gpt2",
    "n_ctx output_past task_specific_params": "gpt2-xl",
    "_num_labels n_ctx task_specific_params": "distilgpt2",
    "qkv_bias shared_expert_intermediate_size use_qk_norm": "Qwen3-Coder-480B-A35B-Instruct",
    "experts_per_token initial_context_length": (
        "gpt-oss-20b gpt-oss-120b gpt-oss-safeguard-20b gpt-oss-20b_in_bfloat16"
    ),
    "ep_size moe_layer_freq scoring_func topk_method": "DeepSeek-V3 DeepSeek-R1 DeepSeek-V3.1",
    "aux_loss_alpha moe_layer_freq scoring_func seq_aux": (
        "DeepSeek-V2 DeepSeek-V2-Lite DeepSeek-V2-Lite-Chat DeepSeek-Coder-V2-Lite-Instruct"
    ),
    "normalization_function": "granite-4.0-h-350m granite-4.0-micro",
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu "
    "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc": "LFM2-1.2B LFM2-350M",
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu "
    "block_use_xavier_init conv_dim conv_use_xavier_init num_heads use_pos_enc": "LFM2.5-1.2B-Thinking",
    "attention_head_dim num_hidden_layers rms_norm_eps": "Nemotron-H-8B-Base-8K",
    "num_hidden_layers rms_norm_eps": "NVIDIA-Nemotron-Nano-9B-v2",
    "norm_eps num_hidden_layers": "NVIDIA-Nemotron-3-Nano-30B-A3B",
}


def published(name: str) -> dict[str, Any]:
    """The config of this name."""
    return json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text())


def _listed(*groups: str) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Name -> (config.json, the fields that transformers ignores)."""
    ignored = {name: fields.split() for fields, names in _IGNORED.items() for name in names.split()}
    return {name: (published(name), ignored.get(name, [])) for group in groups for name in _NAMES[group].split()}


def _whole(*groups: str) -> dict[str, dict[str, Any]]:
    """Name -> config.json. Of these the language model alone is loaded, which is said in a warning."""
    return {name: published(name) for group in groups for name in _NAMES[group].split()}


DENSE, MOE, LATENT, HYBRID = map(_listed, ("dense", "moe", "latent", "hybrid"))
WRAPPED, GEMMA4, WRAPPED_HYBRID = map(_whole, ("wrapped", "gemma4", "wrapped_hybrid"))
LISTED = {**DENSE, **MOE, **LATENT, **HYBRID}
PUBLISHED = {name: config for name, (config, _) in LISTED.items()} | WRAPPED | GEMMA4 | WRAPPED_HYBRID

_LLAMA2 = published("Llama-2-7b")
# Name -> (config.json, the field that says why it is not served).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Llama-3.1-8B in 4 bits": (
        {**published("Llama-3.1-8B-Instruct"), "quantization_config": {"bits": 4}},
        "quantization_config",
    ),
    "Llama-3.2-1B for MLX": ({**published("Llama-3.2-1B"), "quantization": {"bits": 4}}, "quantization"),
    "Mistral under another name": ({**_LLAMA2, "sliding_window": 2048}, "sliding_window"),
    "Mistral's name": ({**_LLAMA2, "architectures": ["MistralForCausalLM"]}, "model_type"),
    "Mistral's type": ({**_LLAMA2, "model_type": "mistral"}, "model_type"),
    "Llama with half of each head rotated": ({**_LLAMA2, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
}
