"""Which fields of a ``config.json`` matter, in general and to a family.

Each field is one of these, looked up in this order:

    used        by ``ModelConfig``, or by the family's own config
    NO_EFFECT   says nothing about the function from tokens to logits
    required    transformers acts on it and this engine computes one case: it must have one of that case's values. The
                family says so, or OFF, where the value means that a feature is off
    known       to transformers' config class of the family, and to nothing above: it must have the class's default
    ignored     unknown to that class, so transformers ignores it too; the start lists these
"""

import dataclasses
from typing import Any

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_class import class_parameters
from compiled_llm.models.family import Family
from compiled_llm.models.registry import SUPPORTED

_NO_EFFECT = {
    "_name_or_path",
    "_sliding_window_pattern",  # what Gemma 3's layer_types was made of
    "architectures",  # read beforehand
    "attention_dropout",  # this and other dropouts: of training alone
    "attn_pdrop",
    "bos_token_id",
    "chunk_size",  # of Mamba's scan, which has one result
    "classifier_dropout",
    "dtype",  # read by itself
    "embd_pdrop",
    "embedding_dropout",
    "eos_token_id",  # likewise
    "expand",  # what the size of Nemotron-H's Mamba might be, and is not
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "moe_shared_expert_overlap",  # when it is computed, not what
    "max_window_layers",  # where a sliding window begins, and there is none
    "model_type",  # checked beforehand
    "mtp_layers_block_type",  # of layers that guess further tokens, which are left out
    "num_logits_to_keep",  # of a prompt
    "num_mtp_layers",  # as mtp_layers_block_type
    "num_nextn_predict_layers",  # likewise
    "original_max_position_embeddings",  # as other fields of rotary embeddings: Family.read_ropes sees to it
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",  # changes the order of a sum, not the function
    "problem_type",
    "quantization_config",  # read by itself
    "rescale_prenorm_residual",  # of the first weights
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "router_aux_loss_coef",  # of training
    "router_jitter_noise",  # likewise
    "summary_activation",  # this and the like: of a head of GPT-2 that makes no tokens
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "time_step_floor",  # this, its maximum and minimum: of the first weights
    "time_step_max",
    "time_step_min",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_mamba_kernels",
}
# What ModelConfig is made of, by the names in the file.
_USED = {
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
}
# The first value is the one that messages name.
_OFF: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attention_chunk_size": (None,),
    "chunk_size_feed_forward": (0, None),
    "compression_config": (None,),
    "cross_attention_hidden_size": (None,),
    "fusion_config": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "kv_sharing_modes": (None,),
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None, {}),
    "quantization": (None,),
    "transformers_weights": (None,),
    "use_sliding_window": (False, None),
}


def by_own_names(config: dict[str, Any], config_class: Any) -> dict[str, Any]:
    """``config`` with every field under the name that is a parameter of transformers' class.

    transformers takes some fields under a second name (``attribute_map``), so such a field is not one it ignores.

    Raises:
        ValueError: a field is given under both names, with different values.
    """
    known, own = class_parameters(config_class), dict(config)
    for pair in config_class.attribute_map.items():
        for name, other in (pair, pair[::-1]):
            if other not in own or other in known or name not in known:
                continue
            value = own.pop(other)
            if own.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json: {name}={own[name]!r:.100} and {other}={value!r:.100} contradict each other: both "
                    "name one field"
                )
    return own


def used_names(family: Family, config_class: Any) -> set[str]:
    """The fields that go into the family's config, rotary embeddings left out.

    Those that are neither parameters of transformers' class nor ``old_fields`` are ignored by it, and here.
    """
    fields = {field.name for field in dataclasses.fields(family.config)}
    own = fields - {field.name for field in dataclasses.fields(ModelConfig)}
    known, names = class_parameters(config_class).keys(), _USED | own
    renamed = {config_class.attribute_map[name] for name in config_class.attribute_map.keys() & names - known}
    return (names | renamed) & known | set(family.old_fields)


def ignored_fields(config: dict[str, Any], family: Family, config_class: type) -> list[str]:
    """The fields that transformers ignores.

    Raises:
        ValueError: a field asks for something that this engine does not compute; the message names it.
    """
    known, used, ignored = class_parameters(config_class), used_names(family, config_class), []
    required = {**_OFF, **family.requires}
    for name, value in config.items():
        if name in used or name in _NO_EFFECT:
            continue
        if name in required:
            if value not in required[name]:
                _refuse(name, value, repr(required[name][0]))
        elif name == "sliding_window":
            _check_sliding_window(config, known)
        elif name == "layer_types":
            if value is not None and (not isinstance(value, list) or any(kind != "full_attention" for kind in value)):
                _refuse(name, value, "a list of 'full_attention'")
        elif name in known:
            if value != known[name]:
                _refuse(name, value, repr(known[name]))
        else:
            ignored.append(name)
    return sorted(ignored)


def _check_sliding_window(config: dict[str, Any], known: dict[str, Any]) -> None:
    """A window matters unless it is switched off, or no shorter than any text."""
    window, longest = config["sliding_window"], config.get("max_position_embeddings", known["max_position_embeddings"])
    # Where the class has no switch, the window alone is one.
    switched_on = config.get("use_sliding_window", known.get("use_sliding_window", True))
    covers_all = isinstance(window, int) and isinstance(longest, int) and window >= longest
    if window is not None and switched_on and not covers_all:
        _refuse("sliding_window", window, "null, or at least max_position_embeddings")


def _refuse(name: str, value: Any, allowed: str) -> None:
    raise ValueError(
        f"config.json: {name}={value!r:.200} is not supported: this engine would compute something else than the model "
        f"was made for. Supported value: {allowed}. {SUPPORTED}"
    )
