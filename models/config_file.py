"""Reading a model directory's ``config.json`` into the ``ModelConfig`` of its family.

Every field of the file is looked at (``config_fields.py`` says how): one that this engine does not understand and
transformers does is refused by name, since to ignore it in silence would mean wrong tokens.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from compiled_llm.models.architecture_name import is_wrapper, language_model, with_architecture
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_fields import (
    by_own_names,
    check_types,
    class_parameters,
    filled,
    ignored_fields,
    rope_names,
)
from compiled_llm.models.config_values import (
    MOST,
    check_given_sizes,
    check_own_types,
    check_size,
    eos_token_ids,
    stated_dtype,
)
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.family import Family
from compiled_llm.models.files import read_json, read_optional_json
from compiled_llm.models.known_classes import NotKnown, known_class
from compiled_llm.models.quantized import plan
from compiled_llm.models.registry import SUPPORTED, family, has_own_file
from compiled_llm.models.rope_config import checked_ropes
from compiled_llm.ops.user_warnings import warn


def read_config(directory: Path, model_impl: str = "auto", dtype: str = "auto") -> ModelConfig:
    """Read ``config.json`` (and the end-of-text ids of ``generation_config.json``) of a model directory.

    Warns of the fields that are ignored, once for all of them, of a model of which only the language model is read, and
    of one that runs through transformers' modelling code.

    Args:
        model_impl, dtype: as the engine arguments.

    Raises:
        ValueError: a file is missing or not JSON, or a field is not supported; the message names it.
    """
    config = with_architecture(read_json(directory / "config.json"))
    if is_wrapper(config):
        warn(
            f"{directory / 'config.json'}: of {config['architectures'][0]} the language model alone is loaded: "
            "prompts are text",
        )
    config = language_model(config)
    generation = read_optional_json(directory / "generation_config.json")
    if not has_own_file(config["architectures"][0], model_impl):
        return _through_transformers(directory, config, generation, dtype)
    made = parse_config(config, generation)
    model = family(made.architecture)
    config_class = known_class(model.hf_config) or _config_class(model)
    ignored = ignored_fields(by_own_names(config, config_class), model, config_class)
    if ignored:
        shown = f"{', '.join(ignored):.1000}"
        warn(
            f"{directory / 'config.json'}: fields that transformers ignores for {made.architecture} are ignored "
            f"here too: {shown}",
        )
    return made


def _through_transformers(
    directory: Path, config: dict[str, Any], generation: dict[str, Any], dtype: str
) -> TransformersConfig:
    from compiled_llm.models.fallback.reading import parse_transformers_config  # only when needed

    made = parse_transformers_config(config, generation, config["architectures"][0], dtype)
    own = "; the code that its auto_map names is not run" if "auto_map" in config else ""
    warn(
        f"{directory / 'config.json'}: {made.architecture} runs through transformers' modelling code (transformers "
        f"{made.transformers_version}), recorded as one graph without breaks{own}",
    )
    return made


def parse_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The same from parsed JSON, without the warning. Fields that are left out take transformers' defaults."""
    config = language_model(with_architecture(config))
    model = family(config["architectures"][0])
    known = known_class(model.hf_config)
    if known is not None:
        try:
            return parsed_by(config, generation, model, known)
        except (NotKnown, ValueError):  # transformers' class knows, and words what is wrong
            pass
    return parsed_by(config, generation, model, _config_class(model))


def parsed_by(
    config: dict[str, Any], generation: dict[str, Any] | None, model: Family, config_class: Any
) -> ModelConfig:
    """By transformers' class, or what is known of it; ``NotKnown`` where that is too little."""
    (architecture,) = config["architectures"]
    model_type = config.get("model_type", config_class.model_type)
    if model_type != config_class.model_type:
        raise ValueError(
            f"config.json: model_type must be {config_class.model_type!r} where architectures is "
            f"[{architecture!r}], given {model_type!r:.100}. {SUPPORTED}"
        )
    config = model.updated(checked_ropes(by_own_names(config, config_class)))
    ignored_fields(config, model, config_class)
    published = _published(config, model)
    check_given_sizes(config, config_class)
    check_types(config, config_class)
    model.check({**class_parameters(config_class), **config})
    full = filled(config, config_class, {*model.old_fields, *rope_names(config_class)})
    ropes = model.read_ropes(full)
    sizes = model.sizes(full)
    sizes |= {name: getattr(full, name, None) for name in (*MOST, "rms_norm_eps") if name not in sizes}
    sizes["head_dim"] = sizes["head_dim"] or full.hidden_size // full.num_attention_heads
    for name in MOST:
        check_size(name, sizes[name], config_class.attribute_map.get(name, name))
    own = _own_fields(model, full, sizes)
    return model.config(
        architecture=architecture,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        rms_norm_eps=_epsilon(sizes["rms_norm_eps"], config_class),
        ropes=ropes,
        max_position_embeddings=sizes["max_position_embeddings"],
        tie_word_embeddings=bool(full.tie_word_embeddings),
        dtype=stated_dtype(config, _default_dtype(model, published)),
        eos_token_ids=eos_token_ids(config, generation or {}, sizes["vocab_size"]),
        published=published,
        gguf_layout=str(config.get("gguf_layout", "")),
        **own,
    )


def _own_fields(model: Family, full: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """The fields that the family's config has besides ``ModelConfig``'s, as far as ``sizes`` or ``full`` has them."""
    common = {field.name for field in dataclasses.fields(ModelConfig)}
    own = [field.name for field in dataclasses.fields(model.config) if field.name not in common]
    values = {name: getattr(full, name) for name in own if name not in sizes and hasattr(full, name)}
    values |= {name: sizes[name] for name in own if name in sizes}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    check_own_types(model.config, values)
    return values


def _epsilon(value: Any, config_class: Any) -> float:
    """That of norms, which families name in many ways."""
    names = [name for name in class_parameters(config_class) if name.endswith(("_eps", "epsilon"))]
    if isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"config.json: {names[0]} must be a number of at least 0, given {value!r:.100}")
    return float(value)


def _config_class(model: Family) -> Any:
    import transformers  # a second: only when needed

    return getattr(transformers, model.hf_config)


def _published(config: dict[str, Any], model: Family) -> str:
    """``quantization_config`` as JSON, "" where there is none; ``ValueError`` where it cannot be read."""
    if plan.read_quantization(config, model.quantizations) is None:
        return ""
    return json.dumps(config["quantization_config"], sort_keys=True)


def _default_dtype(model: Family, published: str) -> str:
    """What the model is in where the file names no dtype, as those with experts in MXFP4 need not."""
    return "bfloat16" if published and "mxfp4" in model.quantizations else "float32"
