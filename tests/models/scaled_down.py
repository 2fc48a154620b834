"""Published configs made small: each field that says what is computed stays, sizes and lengths shrink."""

from typing import Any

import transformers

LENGTH = 512  # of the longest text
HEAD_DIM = 16
NUM_LAYERS = 6
_NUM_EXPERTS = 24
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")
_TOKENS = {"vocab_size": 331, "initializer_range": 0.1}  # logits that tell tokens apart


def scaled_down(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with six layers of a few narrow heads; where layers share keys and values, with twice their pattern.

    Windows become shorter than a text of 300 tokens. Lengths of rotary embeddings keep their ratio to the longest text,
    ``LENGTH``, and each frequency its factor.
    """
    if "text_config" in config:  # whose sizes may be left out
        text = config["text_config"]
        defaults = transformers.AutoConfig.for_model(text["model_type"])
        sizes = {name: getattr(defaults, name) for name in _SIZES if text.get(name) is None and hasattr(defaults, name)}
        return {**config, "text_config": scaled_down({**sizes, **text}), "eos_token_id": 2}
    if config["model_type"] == "gpt2":  # whose names for sizes are its own
        sizes = {"n_embd": 112, "n_head": 7, "n_layer": NUM_LAYERS, "n_positions": LENGTH}
        return {**config, **_TOKENS, **sizes, "bos_token_id": 1, "eos_token_id": 2}
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    num_kv_heads = 1 if kv_heads == 1 else 2
    num_heads = num_kv_heads * min(heads // kv_heads, 5)
    num_layers, num_shared = NUM_LAYERS, config.get("num_kv_shared_layers")
    if num_shared:
        num_layers = 2 * (config["layer_types"].index("full_attention") + 1)
    first_layer = 8 if config.get("mamba_n_heads") else 0  # Granite's first layers are all of one kind
    small = {
        **config,
        "hidden_size": num_heads * HEAD_DIM if config.get("head_dim") is None else 112,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        **_TOKENS,
    }
    ratio = LENGTH / config.get("max_position_embeddings", LENGTH)
    changes: dict[str, Any] = {
        "head_dim": HEAD_DIM,
        "block_ff_dim": 96,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": LENGTH,
        "original_max_position_embeddings": round(config.get("original_max_position_embeddings", LENGTH) * ratio),
        "sliding_window": 40,
        "layer_types": (config.get("layer_types") or [])[first_layer : first_layer + num_layers],
        "no_rope_layers": (config.get("no_rope_layers") or [])[:NUM_LAYERS],
        "max_window_layers": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "global_head_dim": 2 * HEAD_DIM,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": num_layers // 2 if num_shared else 0,
        "hidden_size_per_layer_input": 20 if config.get("hidden_size_per_layer_input") else 0,
        "vocab_size_per_layer_input": _TOKENS["vocab_size"],
    }
    if config.get("mamba_n_heads"):
        inner = 2 * small["hidden_size"]
        changes |= {"mamba_n_heads": inner // HEAD_DIM, "mamba_d_head": HEAD_DIM, "mamba_d_state": 24}
        changes |= {"shared_intermediate_size": 56}
    if "hybrid_override_pattern" in config:  # with a layer of attention among others, and one without an MLP
        pattern = config["hybrid_override_pattern"]
        first = pattern.index("*") - 3
        changes |= {"hybrid_override_pattern": pattern[first : first + num_layers], "ssm_state_size": 24}
        changes |= {"mamba_num_heads": 2 * config["n_groups"], "mamba_head_dim": HEAD_DIM}
        changes |= {"moe_shared_expert_intermediate_size": 56}
    if config.get("linear_num_key_heads"):
        ratio_of_heads = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * ratio_of_heads}
        changes |= {"linear_key_head_dim": 24, "linear_value_head_dim": 40, "shared_expert_intermediate_size": 56}
    if config.get("enable_moe_block"):
        changes |= {"num_experts": 12, "top_k_experts": 3, "moe_intermediate_size": 40}
    elif config.get("num_experts_per_tok"):  # which stay, of fewer
        changes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _NUM_EXPERTS)
        changes |= {"moe_intermediate_size": 40}
    if "kv_lora_rank" in config:
        small |= {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
        small |= {"hidden_size": 112, "num_attention_heads": 4}
        changes |= {"num_key_value_heads": 4}
        small |= {"q_lora_rank": 20 if config["q_lora_rank"] else None, "first_k_dense_replace": 1}
    if config.get("quantization_config"):  # by 32 values
        small |= {"hidden_size": 128}
    small |= {name: value for name, value in changes.items() if config.get(name) is not None}
    rotated = int(HEAD_DIM * config.get("partial_rotary_factor", 1.0))
    for name in ("rope_scaling", "rope_parameters"):
        if config.get(name) is not None:
            small[name] = _scaled_rope(config[name], ratio, rotated // 2)
    return small


def _scaled_rope(rope: dict[str, Any], ratio: float, num_frequencies: int) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _scaled_rope(value, ratio, num_frequencies)
        elif name.endswith("max_position_embeddings"):
            small[name] = max(round(value * ratio), 8)
        else:
            small[name] = value[:num_frequencies] if isinstance(value, list) else value
    return small
