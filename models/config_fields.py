"""Which fields of a ``config.json`` matter, whatever the family.

Each field is one of these, looked up in this order:

    NO_EFFECT   says nothing about the function from tokens to logits
    USED        goes into ``ModelConfig``
    OFF         transformers acts on it and this engine does not: it must have one of the values that mean off
    known       to transformers' config class of the family, and to nothing above: it must have the class's default
    ignored     unknown to that class, so transformers ignores it too; the start lists these
"""

import inspect
from typing import Any

from compiled_llm.models import SUPPORTED

_NO_EFFECT = {
    "_name_or_path",
    "architectures",  # read beforehand
    "attention_dropout",
    "bos_token_id",
    "dtype",  # read by itself
    "eos_token_id",  # likewise
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_window_layers",  # where a sliding window begins, and there is none
    "model_type",  # checked beforehand
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",  # changes the order of a sum, not the function
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Those that are not parameters of the family's class are ignored by transformers, and here.
_USED = {
    "attention_bias",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
}
ROPE_FIELDS = {"original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta"}
# The first value is the one that messages name.
_OFF: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "attention_chunk_size": (None,),
    "chunk_size_feed_forward": (0, None),
    "compression_config": (None,),
    "cross_attention_hidden_size": (None,),
    "fusion_config": (None,),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "kv_sharing_modes": (None,),
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None, {}),
    "quantization": (None,),
    "quantization_config": (None,),
    "transformers_weights": (None,),
    "use_sliding_window": (False, None),
}


def class_parameters(config_class: type) -> dict[str, Any]:
    """Name -> default of every field that transformers' config class takes."""
    parameters = inspect.signature(config_class).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def used_fields(config: dict[str, Any], config_class: type) -> dict[str, Any]:
    """What the class is to be made of: what ``ModelConfig`` reads, rotary embeddings left out."""
    known = class_parameters(config_class)
    return {name: value for name, value in config.items() if name in _USED and name in known}


def ignored_fields(config: dict[str, Any], config_class: type) -> list[str]:
    """The fields that transformers ignores.

    Raises:
        ValueError: a field asks for something that this engine does not compute; the message names it.
    """
    known, ignored = class_parameters(config_class), []
    for name, value in config.items():
        if name in _NO_EFFECT or name in ROPE_FIELDS or (name in _USED and name in known):
            continue
        if name == "sliding_window":
            _check_sliding_window(config, known)
        elif name == "layer_types":
            if value is not None and (not isinstance(value, list) or any(kind != "full_attention" for kind in value)):
                _refuse(name, value, "a list of 'full_attention'")
        elif name in _OFF:
            if value not in _OFF[name]:
                _refuse(name, value, repr(_OFF[name][0]))
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
