"""Reading the ``config.json`` of a model that runs through transformers' modelling code.

transformers' own config class reads the fields, and its modelling code acts on them: so no field is overlooked. Only
classes that transformers itself ships are ever run, whatever a model directory asks for: code of a checkpoint
(``auto_map``) is not.
"""

import importlib.metadata
import json
from typing import Any

import torch

from compiled_llm.models.config import FULL, SLIDING
from compiled_llm.models.config_fields import beside_defaults, check_types, filled
from compiled_llm.models.config_values import check_given_sizes, check_size, eos_token_ids, stated_dtype
from compiled_llm.models.fallback.attention import Unsupported
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.fallback.module import make_module
from compiled_llm.models.fallback.recording import recorded
from compiled_llm.models.registry import SUPPORTED
from compiled_llm.models.rope_config import checked_ropes

# Fields that ask for something that lies around transformers' modelling code -> values that ask for nothing.
_OFF: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "compression_config": (None,),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "quantization": (None,),
    "quantization_config": (None,),
    "transformers_weights": (None,),
}
# Rotary embeddings that follow from the longest text at hand, which is none of a step's with many requests.
_DYNAMIC_ROPES = ("dynamic", "longrope")


def parse_transformers_config(
    config: dict[str, Any], generation: dict[str, Any], architecture: str, dtype: str
) -> TransformersConfig:
    """The config of a parsed ``config.json``, whose model is run in ``dtype`` ("auto": the checkpoint's).

    Raises:
        ValueError: the model cannot run through transformers' modelling code here; the message says why.
    """
    _check_fields(config, architecture)
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[config["model_type"]]
    check_given_sizes(config, config_class)
    check_types(config, config_class)
    config = checked_ropes(config)
    full = filled(config, config_class, config.keys())
    longest: Any = getattr(full, "max_position_embeddings", None)
    check_size("max_position_embeddings", longest)
    _check_layers(full)
    _check_ropes(full)
    stated = stated_dtype(config, "float32")
    if dtype == "auto":
        dtype = stated
    fields = json.dumps({**config, "dtype": stated, "torch_dtype": None}, sort_keys=True)
    try:
        recording = recorded(architecture, fields, getattr(torch, dtype))
    except ValueError as error:
        raise ValueError(f"{error}{_told(fields, config, config_class)}") from error
    widest = max((linear.out_features for linear in recording.module.linears), default=recording.hidden_size)
    return TransformersConfig(
        architecture=architecture,
        vocab_size=recording.vocab_size,
        hidden_size=recording.hidden_size,
        intermediate_size=widest,
        num_layers=len(recording.layers),
        num_heads=recording.layers[0].num_heads,
        num_kv_heads=recording.layers[0].num_kv_heads,
        head_dim=recording.layers[0].head_dim,
        rms_norm_eps=0.0,
        ropes=(),
        max_position_embeddings=longest,
        tie_word_embeddings=bool(full.tie_word_embeddings),
        dtype=dtype,
        eos_token_ids=eos_token_ids(config, generation, recording.vocab_size),
        fields=fields,
        transformers_version=importlib.metadata.version("transformers"),
    )


def _told(fields: str, config: dict[str, Any], config_class: Any) -> str:
    """For messages, of fields that transformers' module cannot be made of: those without which it can."""

    def is_made(given: dict[str, Any]) -> bool:
        try:
            make_module(json.dumps(given), torch.float32)
        except Exception as error:
            return isinstance(error, Unsupported)
        return True

    given = json.loads(fields)
    sizes = beside_defaults(config, config_class)
    if is_made(given):
        return sizes
    others = ({name: value for name, value in given.items() if name != left_out} for left_out in config)
    guilty = [name for name, rest in zip(config, others, strict=True) if is_made(rest)]
    shown = ", ".join(f"{name}={config[name]!r:.100}" for name in guilty)
    return f"{shown and f'; given {shown:.500}'}{sizes}"


def _check_fields(config: dict[str, Any], architecture: str) -> None:
    """``ValueError`` for a parsed ``config.json`` whose model this engine cannot run through transformers' code."""
    from transformers import CONFIG_MAPPING  # a second: only when needed
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != architecture:
        raise ValueError(
            f"config.json: architecture {architecture!r:.100} with model_type={model_type!r:.100} is not supported: "
            "neither this engine nor the installed transformers has a causal language model of these names"
            f"{', and the code that auto_map names is never run' if 'auto_map' in config else ''}. {SUPPORTED}"
        )
    if "text_config" in CONFIG_MAPPING[model_type].sub_configs:
        raise ValueError(
            f"config.json: architecture {architecture!r:.100} is not supported: it is more than a language model. "
            f"{SUPPORTED}"
        )
    for name, allowed in _OFF.items():
        if config.get(name) not in allowed:
            raise ValueError(
                f"config.json: {name}={config[name]!r:.200} is not supported: this engine would compute something else "
                f"than the model was made for. Supported value: {allowed[0]!r}. {SUPPORTED}"
            )


def _check_layers(config: Any) -> None:
    """``ValueError`` for a config of transformers' class with layers that keep something else than keys and values."""
    others = set(getattr(config, "layer_types", None) or ()) - {SLIDING, FULL}
    if others:
        raise ValueError(
            f"config.json: layer_types={sorted(others)} are not supported through transformers' modelling code. "
            f"Supported are {FULL!r} and {SLIDING!r}. {SUPPORTED}"
        )


def _check_ropes(config: Any) -> None:
    """``ValueError`` for a config of transformers' class with rotary embeddings that depend on other requests."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") in _DYNAMIC_ROPES:
            raise ValueError(
                f"config.json: rope_type={rope['rope_type']!r} is not supported through transformers' modelling code, "
                f"which goes by the longest text of a step. {SUPPORTED}"
            )
