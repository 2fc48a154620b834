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
    """

    name: str
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: Callable[[Metadata], Fields] = lambda metadata: {}
    in_pairs: bool = False
    plus_one: bool = False
    partial: bool = False
    fixed_bias: bool = False


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
    return found, config | found.more(metadata)


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
        fields = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
        return Architecture("MixtralForCausalLM", {**fields, **_HEAD}, in_pairs=True, fixed_bias=True)
    return Architecture("LlamaForCausalLM", _HEAD, _mlp_bias, in_pairs=True)


def _granite(metadata: Metadata) -> Fields:
    scales = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
    scales |= {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
    return {field: metadata.need(key) for key, field in scales.items()} | _mlp_bias(metadata)


def _gemma_scale(metadata: Metadata, layers_of_largest: int) -> Fields:
    """The largest model divides by the width of a head that would fill the hidden size."""
    heads, head_dim = metadata.need("attention.head_count"), metadata.get("attention.key_length", 256)
    is_largest = metadata.need("block_count") == layers_of_largest
    return {"query_pre_attn_scalar": metadata.need("embedding_length") // heads if is_largest else head_dim}


def _gemma2(metadata: Metadata) -> Fields:
    capped = {key: metadata.get(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return capped | _gemma_scale(metadata, 46)


def _gemma3(metadata: Metadata) -> Fields:
    return {
        "rope_parameters": _ropes(metadata, metadata.get("rope.freq_base_swa", 10000.0)),
        "layer_types": _layer_types(metadata, 6),
    } | _gemma_scale(metadata, 62)


def _layer_types(metadata: Metadata, period: int) -> list[str]:
    """By the pattern of the file, a flag for each layer or a period, or else by ``period``."""
    count = metadata.need("block_count")
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
    return {**dense, **own, "use_expert_bias": any(".exp_probs_b" in name for name in metadata.header.tensors)}


def _glm4_moe(metadata: Metadata) -> Fields:
    """Layers that guess the token after the next follow the others, and are counted with them."""
    count = metadata.need("block_count") - metadata.get("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": count,
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
        "n_group": metadata.get("expert_group_count", 1),
        "topk_group": metadata.get("expert_group_used_count", 1),
    }


def _smollm3(metadata: Metadata) -> Fields:
    return {"no_rope_layer_interval": 4}


def _phi3(metadata: Metadata) -> Fields:
    original = metadata.get("rope.scaling.original_context_length")
    longest = {} if original is None else {"original_max_position_embeddings": original}
    return {"pad_token_id": None} | longest


def _qwen3_moe(metadata: Metadata) -> Fields:
    return {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _starcoder2(metadata: Metadata) -> Fields:
    return {
        "use_bias": metadata.has("blk.0.attn_q.bias"),
        "norm_epsilon": metadata.need("attention.layer_norm_epsilon"),
    }


ARCHITECTURES: dict[str, Architecture | Callable[[Metadata], Architecture]] = {
    "gemma2": Architecture("Gemma2ForCausalLM", {**_HEAD, **_WINDOW}, _gemma2, plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", {**_HEAD, **_WINDOW}, _gemma3, plus_one=True),
    "glm4moe": Architecture("Glm4MoeForCausalLM", {**_HEAD, **_ROUTED}, _glm4_moe, partial=True),
    "glm4": Architecture("Glm4ForCausalLM", _HEAD, partial=True),
    "granite": Architecture("GraniteForCausalLM", {}, _granite, in_pairs=True),
    "lfm2": Architecture("Lfm2ForCausalLM", _NORM_EPS, _lfm2, fixed_bias=True),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", {**_NORM_EPS, **_EXPERTS}, _lfm2_moe, fixed_bias=True),
    "llama": _llama,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "phi3": Architecture("Phi3ForCausalLM", _WINDOW, _phi3, partial=True),
    "qwen2": Architecture("Qwen2ForCausalLM", fixed_bias=True),
    "qwen3": Architecture("Qwen3ForCausalLM", _HEAD),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", {**_HEAD, **_EXPERTS}, _qwen3_moe),
    "seed_oss": Architecture("SeedOssForCausalLM", _HEAD, _seed_oss),
    "smollm3": Architecture("SmolLM3ForCausalLM", _HEAD, _smollm3, in_pairs=True),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {}, _starcoder2, fixed_bias=True),
}
"""Architectures by the names that files have for them; a function where metadata decide."""
