"""Which fields of a ``config.json`` matter, in general and to a family, and what transformers' class makes of them.

The class is transformers' own, never code of a model directory. It knows defaults, types, the names that older versions
wrote, and puts what they say of rotary embeddings into ``rope_parameters``.

Each field is one of these, looked up in this order:

    used        by ``ModelConfig``, or by the family's own config
    NO_EFFECT   says nothing about the function from tokens to logits
    required    transformers acts on it and this engine computes one case: it must have one of that case's values. The
                family says so, or OFF, where the value means that a feature is off
    known       to transformers' config class of the family, and to nothing above: it must have the class's default
    ignored     unknown to that class, so transformers ignores it too; the start lists these
"""

import copy
import dataclasses
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_values import MOST
from compiled_llm.models.family import Family
from compiled_llm.models.known_classes import KnownClass
from compiled_llm.models.registry import SUPPORTED

# Read here, or of no effect: transformers' class is not asked about them.
LEFT_OUT = {"architectures", "dtype", "model_type", "quantization_config", "torch_dtype", "transformers_version"}
LEFT_OUT |= {"gguf_layout"}


def class_parameters(config_class: Any) -> Mapping[str, Any]:
    """Name -> default of every field that transformers' config class, or a ``KnownClass``, takes."""
    if isinstance(config_class, KnownClass):
        return config_class.parameters
    parameters = inspect.signature(config_class).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def rope_names(config_class: Any) -> set[str]:
    """Fields of rotary embeddings that the class puts into ``rope_parameters``, if it has these."""
    others = {"original_max_position_embeddings", "partial_rotary_factor", "rope_scaling", "rope_theta"}
    return others if "rope_parameters" in class_parameters(config_class) else set()


def check_types(config: dict[str, Any], config_class: Any) -> None:
    """``ValueError`` for a field of a parsed ``config.json`` whose value has not the type that the class declares.

    ``NotKnown`` where a ``KnownClass`` cannot say whether it has.
    """
    if isinstance(config_class, KnownClass):
        config_class.check_types(config)
        return
    declared = config_class.__dataclass_fields__
    for name in config.keys() & config_class.__validators__.keys() - LEFT_OUT:
        for validate in config_class.__validators__[name]:
            try:
                validate(config[name])
            except (TypeError, ValueError) as error:
                kind = declared[name].type
                allowed = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind)
                told = f": {error!s:.200}" if isinstance(error, ValueError) else ""
                raise ValueError(
                    f"config.json: {name} must be {allowed}, as transformers' {config_class.__name__} has it, given "
                    f"{config[name]!r:.100}{told}"
                ) from error


def filled(config: dict[str, Any], config_class: Any, others: Collection[str]) -> Any:
    """transformers' config of a parsed ``config.json``, whose ``rope_parameters`` are as its models read them.

    Args:
        others: names of fields that the class does not declare, and acts on.

    Raises:
        ValueError: the class cannot make sense of the fields; the message names those that it would do without,
            or all where it is not one alone.
        NotKnown: of a ``KnownClass``.
    """
    if isinstance(config_class, KnownClass):
        return config_class.filled(config, others)
    names = (class_parameters(config_class).keys() | set(others)) - LEFT_OUT
    given = {name: config[name] for name in config.keys() & names}
    if given.get("rope_scaling", ...) is None:  # which is how older versions wrote that there is none
        del given["rope_scaling"]
    try:
        return _made(given, config_class)
    except Exception as error:  # whatever exception transformers' own checks use
        guilty = [name for name in sorted(given) if _is_made({**given}, config_class, without=name)]
        shown = ", ".join(f"{name}={given[name]!r:.300}" for name in guilty or sorted(given))
        raise ValueError(
            f"config.json: transformers' {config_class.__name__} refuses {shown:.1500}"
            f"{beside_defaults(config, config_class)}: {type(error).__name__}: {error!s:.500}"
        ) from error


def _made(given: dict[str, Any], config_class: Any) -> Any:
    from transformers.utils import logging

    told = logging.get_verbosity()
    logging.set_verbosity_error()  # what it remarks on would be told as often as it is asked
    try:
        full = config_class(**copy.deepcopy(given))  # it fills in the objects that it is given
        if getattr(full, "rope_parameters", None):
            full.standardize_rope_params()  # as models do once more, now that all fields are attributes
        return full
    finally:
        logging.set_verbosity(told)


def beside_defaults(config: dict[str, Any], config_class: Any) -> str:
    """For messages: the sizes that a parsed ``config.json`` leaves out, with the class's defaults."""
    known, names = class_parameters(config_class), config_class.attribute_map
    absent = ({names.get(name, name) for name in MOST} & known.keys()) - config.keys()
    told = ", ".join(f"{name}={known[name]!r:.100}" for name in sorted(absent) if known[name] is not None)
    return told and f", beside {told} by default"


def _is_made(given: dict[str, Any], config_class: Any, without: str) -> bool:
    del given[without]
    try:
        _made(given, config_class)
    except Exception:
        return False
    return True


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
    "gguf_layout",  # read by itself
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
    "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
}  # fmt: skip
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


def ignored_fields(config: dict[str, Any], family: Family, config_class: Any) -> list[str]:
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


def _check_sliding_window(config: dict[str, Any], known: Mapping[str, Any]) -> None:
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
