"""What GGUF calls a model's architecture and its sizes, and what ``config.json`` calls them.

github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, says what its files hold, and src/llama-model.cpp what it takes
where a file is silent. A new architecture is an entry of ``ARCHITECTURES``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compiled_llm.checkpoint.gguf.header import Header
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.models.config_values import MOST
from compiled_llm.models.files import open_file

Fields = dict[str, Any]

# Key of metadata, after the architecture's name and a dot -> field of config.json.
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_HEAD = {"attention.key_length": "head_dim"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_NORM_EPS = {"attention.layer_norm_rms_epsilon": "norm_eps"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERTS |= {"expert_feed_forward_length": "moe_intermediate_size"}
_ROUTED = _EXPERTS | {"expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts"}
_ROUTED |= {"leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor"}
_ROUTED |= {"expert_weights_norm": "norm_topk_prob"}
_SHARED = _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


class Metadata:
    """The metadata of one architecture, looked up by what follows its name.

    Attributes:
        architecture: as the file calls it.
        header: of the file.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.architecture: str = header.metadata.get("general.architecture", "")
        if not isinstance(self.architecture, str) or not self.architecture:
            raise CheckpointError(f"{header.paths[0]}: its metadata must name general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.header.paths[0]}: its metadata lack {self.architecture}.{key}")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def has_any(self, end: str) -> bool:
        """Whether the name of a tensor ends so."""
        return any(name.endswith(end) for name in self.header.tensors)

    def values(self, tensor: str) -> list[float]:
        """The numbers of a small tensor of float32."""
        place = self.header.tensors[tensor]
        if place.kind != "F32" or len(place.shape) != 1:
            raise CheckpointError(f"{place.path}: {tensor} must be a row of F32, found {place.kind} {place.shape}")
        with open_file(place.path) as file:
            return np.fromfile(file, "<f4", place.shape[0], offset=place.offset).tolist()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How files of an architecture become a checkpoint in the layout of the hub.

    Attributes:
        name: of the class in ``config.json``.
        fields: keys beside ``_SIZES`` -> their fields.
        more: metadata -> fields that need more than another name.
        in_pairs: whether the rows of a head's query and key lie as neighbours that rotary embeddings turn together.
        plus_one: whether norms are stored with 1 added.
        partial: whether rotary embeddings may turn a part of a head.
        fixed_bias: whether queries, keys and values always have biases, or as another field says.
        unknown: fields that its class does not have.
        is_cut: whether files cut tensors in another way than the hub's, as ``ModelConfig.gguf_layout`` says.
    """

    name: str
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: Callable[[Metadata], Fields] = lambda metadata: {}
    in_pairs: bool = False
    plus_one: bool = False
    partial: bool = False
    fixed_bias: bool = False
    unknown: tuple[str, ...] = ()
    is_cut: bool = False


def config_of(header: Header) -> tuple[Architecture, Fields]:
    """The architecture of a file, and its ``config.json`` without a ``quantization_config``.

    Raises:
        ValueError: it is not supported, or its metadata lack a size.
    """
    metadata = Metadata(header)
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise CheckpointError(
            f"{header.paths[0]}: general.architecture must be one of {', '.join(sorted(ARCHITECTURES))}, found "
            f"{metadata.architecture!r:.100}. Load the model's checkpoint from the hub instead"
        )
    if callable(found):
        found = found(metadata)
    config: Fields = {"architectures": [found.name], "dtype": "bfloat16"}
    for key, field in {**_SIZES, **found.fields}.items():
        if (value := metadata.get(key)) is not None:
            config[field] = value
    if "sliding_window" in found.fields.values():  # Phi-4 says 0, and classes of transformers have windows of their own
        config["sliding_window"] = config.get("sliding_window") or None
    for key in ("context_length", "embedding_length", "block_count", "attention.head_count"):
        metadata.need(key)
    tokens = header.metadata.get("tokenizer.ggml.tokens", [])
    embedding = header.tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding is not None else len(tokens)
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["rope_parameters"] = _rope(metadata, found)
    config |= _token_ids(header) | _attention(metadata, found)
    if found.is_cut:
        config["gguf_layout"] = metadata.architecture
    config |= found.more(metadata)
    return found, {field: value for field, value in config.items() if field not in found.unknown}


def _attention(metadata: Metadata, architecture: Architecture) -> Fields:
    """What the tensors of the first attention say of all."""
    query = next((one for name, one in metadata.header.tensors.items() if name.endswith(".attn_q.weight")), None)
    heads, fields = metadata.need("attention.head_count"), Fields()
    if query is not None and isinstance(heads, int) and query.shape[0] != metadata.need("embedding_length"):
        fields["head_dim"] = query.shape[0] // heads
    if query is not None and not architecture.fixed_bias:
        fields["attention_bias"] = metadata.has(query.name.replace(".weight", ".bias"))
    return fields


def _token_ids(header: Header) -> Fields:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
    given = {field: header.metadata.get(f"tokenizer.ggml.{key}") for key, field in names.items()}
    return {field: int(value) for field, value in given.items() if value is not None}


def _rope(metadata: Metadata, architecture: Architecture) -> Fields:
    rope: Fields = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base", 10000.0)}
    if architecture.partial and (turned := metadata.get("rope.dimension_count")):
        head_dim = metadata.get("attention.key_length") or (
            metadata.need("embedding_length") // metadata.need("attention.head_count")
        )
        rope["partial_rotary_factor"] = turned / head_dim
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor")
    original = metadata.get("rope.scaling.original_context_length")
    if metadata.has("rope_freqs.weight"):  # the divisors of Llama 3's scaling, already computed
        divisors = metadata.values("rope_freqs.weight")
        return rope | _divided(divisors, divisors, metadata.need("context_length"), 1.0)
    if metadata.has("rope_factors_short.weight"):
        short, long = metadata.values("rope_factors_short.weight"), metadata.values("rope_factors_long.weight")
        return rope | _divided(
            short, long, original or metadata.need("context_length"), metadata.get("rope.scaling.attn_factor", 1.0)
        )
    if kind == "linear" and factor:
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor:
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        given = {"attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        values = {field: metadata.get(f"rope.scaling.{key}") for key, field in given.items()}
        rope |= {field: value for field, value in values.items() if value is not None}
        return rope
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(
            f"{metadata.header.paths[0]}: rope.scaling.type must be none, linear, yarn or longrope, found {kind!r:.100}"
        )
    return rope


def _divided(short: list[float], long: list[float], original: int, attention_factor: float) -> Fields:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }


# -- Architectures


def _mlp_bias(metadata: Metadata) -> Fields:
    return {"mlp_bias": metadata.has("blk.0.ffn_up.bias")}


def _llama(metadata: Metadata) -> Architecture:
    if metadata.get("expert_count"):
        return Architecture("MixtralForCausalLM", {**_LOCAL_EXPERTS, **_HEAD}, in_pairs=True, fixed_bias=True)
    return Architecture("LlamaForCausalLM", _HEAD, _mlp_bias, in_pairs=True)


def _scales(metadata: Metadata) -> Fields:
    scales = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
    scales |= {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
    return {field: metadata.need(key) for key, field in scales.items()}


def _granite(metadata: Metadata) -> Fields:
    return _scales(metadata) | _mlp_bias(metadata)


def _gemma_scale(metadata: Metadata, layers_of_largest: int) -> Fields:
    """The largest model divides by the width of a head that would fill the hidden size."""
    heads, head_dim = metadata.need("attention.head_count"), metadata.get("attention.key_length", 256)
    is_largest = metadata.need("block_count") == layers_of_largest
    return {"query_pre_attn_scalar": metadata.need("embedding_length") // heads if is_largest else head_dim}


def _gemma2(metadata: Metadata) -> Fields:
    capped = {key: metadata.get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return capped | {"layer_types": _layer_types(metadata, 2)} | _gemma_scale(metadata, 46)


def _gemma3(metadata: Metadata) -> Fields:
    return {
        "rope_parameters": _ropes(metadata, metadata.get("rope.freq_base_swa", 10000.0)),
        "layer_types": _layer_types(metadata, 6),
    } | _gemma_scale(metadata, 62)


def _layer_types(metadata: Metadata, period: int) -> list[str]:
    """By the pattern of the file, a flag for each layer or a period, or else by ``period``."""
    count = _block_count(metadata)
    given = metadata.get("attention.sliding_window_pattern", period)
    slides = given if isinstance(given, list) else [(i + 1) % given != 0 for i in range(count)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _olmo2(metadata: Metadata) -> Architecture:
    if metadata.get("attention.sliding_window") is None:
        return Architecture("Olmo2ForCausalLM")
    return Architecture("Olmo3ForCausalLM", _WINDOW, _olmo3)


def _olmo3(metadata: Metadata) -> Fields:
    return {
        "layer_types": _layer_types(metadata, 4),
        "rope_parameters": _ropes(metadata, metadata.get("rope.freq_base")),
    }


def _ropes(metadata: Metadata, local_base: float) -> Fields:
    """Layers with a window have a base of their own, and no scaling."""
    local = {"rope_type": "default", "rope_theta": local_base}
    return {"full_attention": _rope(metadata, Architecture("")), "sliding_attention": local}


def _seed_oss(metadata: Metadata) -> Fields:
    biases = {"attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
    return {field: metadata.has(f"blk.0.{tensor}.bias") for field, tensor in biases.items()}


def _mistral3(metadata: Metadata) -> Architecture:
    if metadata.get("rope.scaling.type") != "yarn":
        return Architecture("MistralForCausalLM", {**_HEAD, **_WINDOW}, in_pairs=True, fixed_bias=True)
    return Architecture("Ministral3ForCausalLM", _HEAD, _ministral3, in_pairs=True, fixed_bias=True)


def _ministral3(metadata: Metadata) -> Fields:
    slope = metadata.get("rope.scaling.yarn_log_multiplier", 1.0)
    own = {
        "mscale": slope,
        "mscale_all_dim": slope,
        "llama_4_scaling_beta": metadata.need("attention.temperature_scale"),
    }
    return {"rope_parameters": _rope(metadata, Architecture("")) | own}


def _lfm2(metadata: Metadata) -> Fields:
    """Layers without heads of keys and values are convolutions."""
    heads = metadata.need("attention.head_count_kv")
    kinds = ["full_attention" if count else "conv" for count in heads]
    fields = {
        "layer_types": kinds,
        "num_key_value_heads": max(heads),
        "conv_L_cache": metadata.need("shortconv.l_cache"),
    }
    return {**fields, "block_auto_adjust_ff_dim": False}


def _lfm2_moe(metadata: Metadata) -> Fields:
    own = {"num_dense_layers": metadata.need("leading_dense_block_count"), "norm_topk_prob": True}
    dense = {key: value for key, value in _lfm2(metadata).items() if key != "block_auto_adjust_ff_dim"}
    return {**dense, **own, "use_expert_bias": metadata.has_any(".exp_probs_b.bias")}


def _glm4_moe(metadata: Metadata) -> Fields:
    return {
        "num_hidden_layers": _layers(metadata),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
    }


def _layers(metadata: Metadata) -> int:
    """Without those that guess the token after the next, which follow the others."""
    return _block_count(metadata) - metadata.get("nextn_predict_layers", 0)


def _block_count(metadata: Metadata) -> int:
    """Checked here, since lists of that length are made before the other sizes are checked."""
    count, most = metadata.need("block_count"), MOST["num_hidden_layers"]
    if count > most:
        raise CheckpointError(
            f"{metadata.header.paths[0]}: {metadata.architecture}.block_count must be at most {most}, found {count}: "
            "no model has that many layers, so the file is damaged; get it again"
        )
    return count


def _gpt_oss(metadata: Metadata) -> Fields:
    rope = _rope(metadata, Architecture(""))
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {"rope_parameters": rope, "layer_types": _layer_types(metadata, 2)}


def _deepseek2(metadata: Metadata) -> Architecture:
    is_cut = metadata.has("blk.0.attn_k_b.weight")
    fields = {**_ROUTED, "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"}
    fields |= {"rope.dimension_count": "qk_rope_head_dim"}
    if metadata.has_any(".exp_probs_b.bias"):
        return Architecture("DeepseekV3ForCausalLM", fields, _latent, fixed_bias=True, is_cut=is_cut)
    return Architecture("DeepseekV2ForCausalLM", fields, _deepseek_v2, fixed_bias=True, is_cut=is_cut)


def _latent(metadata: Metadata) -> Fields:
    """Older files give the sizes of heads under the usual names, newer ones those of what is cached."""
    turned, heads = metadata.need("rope.dimension_count"), metadata.need("attention.head_count")
    key = metadata.get("attention.key_length_mla") or metadata.need("attention.key_length")
    rope = _rope(metadata, Architecture(""))
    if rope["rope_type"] == "yarn" and (slope := metadata.get("rope.scaling.yarn_log_multiplier")):
        slope = round(slope * 10, 6)
        rope |= {"mscale": slope, "mscale_all_dim": slope}
    return {
        "num_hidden_layers": _layers(metadata),
        "num_key_value_heads": heads,
        "head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": metadata.get("attention.value_length_mla") or metadata.need("attention.value_length"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "attention_bias": metadata.has("blk.0.attn_kv_a_mqa.bias"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
        "rope_parameters": rope,
    }


def _deepseek_v2(metadata: Metadata) -> Fields:
    is_grouped = metadata.get("expert_group_count", 1) > 1
    return _latent(metadata) | {"topk_method": "group_limited_greedy" if is_grouped else "greedy"}


def _qwen35(metadata: Metadata) -> Fields:
    count, heads = _layers(metadata), metadata.need("ssm.time_step_rank")
    period = metadata.get("full_attention_interval", 4)
    recurrent = metadata.get("attention.recurrent_layers", [(i + 1) % period != 0 for i in range(count)])
    return {
        "num_hidden_layers": count,
        "head_dim": metadata.need("attention.key_length"),
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:count]],
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.need("ssm.inner_size") // heads,
    }


def _qwen3_next(metadata: Metadata) -> Architecture:
    """Older files have the projections of queries, keys, values and gates in one tensor, as the hub."""
    is_cut = not metadata.has_any(".ssm_in.weight")
    return Architecture("Qwen3NextForCausalLM", _SHARED, _qwen3_next_more, plus_one=True, partial=True, is_cut=is_cut)


def _qwen3_next_more(metadata: Metadata) -> Fields:
    return _qwen35(metadata) | _qwen3_moe(metadata)


def _mamba(metadata: Metadata) -> dict[str, int]:
    """Sizes by the names that Granite's configs have for them, after ``mamba_``."""
    heads, inner = metadata.need("ssm.time_step_rank"), metadata.need("ssm.inner_size")
    return {
        "n_heads": heads,
        "d_head": inner // heads,
        "n_groups": metadata.need("ssm.group_count"),
        "d_state": metadata.need("ssm.state_size"),
        "d_conv": metadata.need("ssm.conv_kernel"),
    }


def _granite_hybrid(metadata: Metadata) -> Fields:
    heads = metadata.need("attention.head_count_kv")
    shared = metadata.get("expert_shared_feed_forward_length") or metadata.need("feed_forward_length")
    return _scales(metadata) | {
        **{f"mamba_{name}": size for name, size in _mamba(metadata).items()},
        "mamba_expand": metadata.need("ssm.inner_size") // metadata.need("embedding_length"),
        "mamba_conv_bias": metadata.has_any(".ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.has_any(".ssm_in.bias"),
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "position_embedding_type": "rope" if metadata.get("rope.scaling.finetuned", False) else "nope",
        "shared_intermediate_size": shared,
        "num_local_experts": metadata.get("expert_count", 0),
        "num_experts_per_tok": metadata.get("expert_used_count", 0),
    }


def _nemotron_h(metadata: Metadata) -> Fields:
    """A block is one of attention, an MLP or experts, and Mamba-2, as its sizes say."""
    heads, inner = metadata.need("attention.head_count_kv"), metadata.need("feed_forward_length")
    sizes, of_mlp = _mamba(metadata), "moe" if metadata.get("expert_count") else "mlp"
    kinds = [
        "full_attention" if kv else of_mlp if size else "linear_attention"
        for kv, size in zip(heads, inner, strict=True)
    ]
    fields: Fields = {
        "layers_block_type": kinds[: _layers(metadata)],
        "head_dim": metadata.need("attention.key_length"),
        "num_key_value_heads": max(heads),
        "intermediate_size": max(inner),
        "mamba_num_heads": sizes["n_heads"],
        "mamba_head_dim": sizes["d_head"],
        "n_groups": sizes["n_groups"],
        "ssm_state_size": sizes["d_state"],
        "conv_kernel": sizes["d_conv"],
        "use_bias": metadata.has_any(".ssm_in.bias"),
        "use_conv_bias": metadata.has_any(".ssm_conv1d.bias"),
        "mlp_bias": metadata.has_any(".ffn_up.bias"),
        "layer_norm_epsilon": metadata.get("attention.layer_norm_rms_epsilon")
        or metadata.need("attention.layer_norm_epsilon"),
        "rope_parameters": None,
    }
    if of_mlp == "moe":
        fields |= {
            "moe_shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length"),
            "moe_latent_size": metadata.get("moe_latent_size"),
            "n_group": metadata.get("expert_group_count", 1),
            "topk_group": metadata.get("expert_group_used_count", 1),
        }
    return fields


def _gpt2(metadata: Metadata) -> Fields:
    return {"rope_parameters": None, "layer_norm_epsilon": metadata.need("attention.layer_norm_epsilon")}


def _smollm3(metadata: Metadata) -> Fields:
    return {"no_rope_layer_interval": 4}


def _phi3(metadata: Metadata) -> Fields:
    original = metadata.get("rope.scaling.original_context_length")
    longest = {} if original is None else {"original_max_position_embeddings": original}
    return {"pad_token_id": None} | longest


def _no_window(metadata: Metadata) -> Fields:
    return {"sliding_window": None}


def _qwen3_moe(metadata: Metadata) -> Fields:
    return {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _starcoder2(metadata: Metadata) -> Fields:
    return {
        "use_bias": metadata.has("blk.0.attn_q.bias"),
        "norm_epsilon": metadata.need("attention.layer_norm_epsilon"),
    }


_NEMOTRON_H = Architecture(
    "NemotronHForCausalLM", _ROUTED, _nemotron_h, in_pairs=True, fixed_bias=True, unknown=("num_hidden_layers",)
)

ARCHITECTURES: dict[str, Architecture | Callable[[Metadata], Architecture]] = {
    "deepseek2": _deepseek2,
    "gemma2": Architecture("Gemma2ForCausalLM", {**_HEAD, **_WINDOW}, _gemma2, plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", {**_HEAD, **_WINDOW}, _gemma3, plus_one=True),
    "glm4moe": Architecture("Glm4MoeForCausalLM", {**_HEAD, **_ROUTED}, _glm4_moe, partial=True),
    "glm4": Architecture("Glm4ForCausalLM", _HEAD, partial=True),
    "gpt-oss": Architecture("GptOssForCausalLM", {**_LOCAL_EXPERTS, **_HEAD, **_WINDOW}, _gpt_oss, is_cut=True),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {"feed_forward_length": "n_inner"},
        _gpt2,
        fixed_bias=True,
        unknown=("num_key_value_heads",),
        is_cut=True,
    ),
    "granite": Architecture("GraniteForCausalLM", {}, _granite, in_pairs=True),
    "granitehybrid": Architecture("GraniteMoeHybridForCausalLM", {}, _granite_hybrid, in_pairs=True, is_cut=True),
    "lfm2": Architecture("Lfm2ForCausalLM", _NORM_EPS, _lfm2, fixed_bias=True),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", {**_NORM_EPS, **_EXPERTS}, _lfm2_moe, fixed_bias=True),
    "llama": _llama,
    "mistral3": _mistral3,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "olmo2": _olmo2,
    "phi3": Architecture("Phi3ForCausalLM", _WINDOW, _phi3, partial=True),
    "qwen2": Architecture("Qwen2ForCausalLM", {}, _no_window, fixed_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", _HEAD, _no_window),
    "qwen35": Architecture("Qwen3_5ForCausalLM", {}, _qwen35, plus_one=True, partial=True, is_cut=True),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        _SHARED,
        _qwen35,
        plus_one=True,
        partial=True,
        unknown=("intermediate_size",),
        is_cut=True,
    ),
    "qwen3next": _qwen3_next,
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**_HEAD, **_EXPERTS}, _qwen3_moe),
    "seed_oss": Architecture("SeedOssForCausalLM", _HEAD, _seed_oss),
    "smollm3": Architecture("SmolLM3ForCausalLM", _HEAD, _smollm3, in_pairs=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {}, _starcoder2, fixed_bias=True),
}
"""Architectures by the names that files have for them; a function where metadata decide."""
