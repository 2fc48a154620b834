"""The architecture of a ``config.json`` that names none: what transformers' auto classes make of its ``model_type``."""

from typing import Any

from compiled_llm.models.registry import ARCHITECTURES, SUPPORTED, WRAPPERS, family


def with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """A parsed ``config.json`` whose ``architectures`` has one name; it may be left out beside ``model_type``.

    Raises:
        ValueError: there is not one name, or ``model_type`` is of no language model.
    """
    given, model_type = config.get("architectures"), config.get("model_type")
    if given is None and isinstance(model_type, str):
        return {**config, "architectures": [_architecture_of(model_type, "text_config" in config)]}
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise ValueError(
            "config.json: architectures must be a list with one name, or be left out where model_type says enough, "
            f"given {given!r:.200} and model_type={model_type!r:.100}. {SUPPORTED}"
        )
    return config


def _architecture_of(model_type: str, is_wrapper: bool) -> str:
    import transformers  # a second: only when needed
    from transformers.models.auto import modeling_auto

    if is_wrapper:
        of_type = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
        found = of_type if of_type in WRAPPERS else None
    else:
        found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if found is None and not is_wrapper:  # not all are known to AutoModelForCausalLM
        own = {getattr(transformers, family(name).hf_config).model_type: name for name in ARCHITECTURES}
        found = own.get(model_type)
    if found is None:
        raise ValueError(
            f"config.json: architectures must be a list with one name where model_type={model_type!r:.100} is of no "
            f"language model that is known. {SUPPORTED}"
        )
    return found
