"""A ``config.json`` through transformers' config class of its model: the defaults of what it leaves out, and types.

The class is transformers' own, never code of a model directory. It also knows the names that older versions wrote, and
puts what they say of rotary embeddings into ``rope_parameters``.
"""

import copy
import inspect
from collections.abc import Collection
from typing import Any

from compiled_llm.models.config_sizes import MOST

# Read here, or of no effect: transformers' class is not asked about them.
_LEFT_OUT = {"architectures", "dtype", "model_type", "quantization_config", "torch_dtype", "transformers_version"}


def class_parameters(config_class: type) -> dict[str, Any]:
    """Name -> default of every field that transformers' config class takes."""
    parameters = inspect.signature(config_class).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}


def rope_names(config_class: type) -> set[str]:
    """Fields of rotary embeddings that the class puts into ``rope_parameters``, if it has these."""
    others = {"original_max_position_embeddings", "partial_rotary_factor", "rope_scaling", "rope_theta"}
    return others if "rope_parameters" in class_parameters(config_class) else set()


def check_types(config: dict[str, Any], config_class: Any) -> None:
    """``ValueError`` for a field of a parsed ``config.json`` whose value has not the type that the class declares."""
    declared = config_class.__dataclass_fields__
    for name in config.keys() & config_class.__validators__.keys() - _LEFT_OUT:
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
    """
    names = (class_parameters(config_class).keys() | set(others)) - _LEFT_OUT
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
