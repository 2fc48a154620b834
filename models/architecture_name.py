"""The architecture of a ``config.json`` that names none, and the language model of one that has more than text."""

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


# Fields of the whole that are the language model's, too, where its own part leaves them out.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config", "quantization")


def is_wrapper(config: dict[str, Any]) -> bool:
    """Whether the parsed ``config.json`` is that of a model around a language model that is supported."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and len(architectures) == 1 and str(architectures[0]) in WRAPPERS


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's ``config.json``, as if it stood alone; ``config`` itself where ``is_wrapper`` says no.

    Raises:
        ValueError: there is no ``text_config``, it is of no supported kind, or it contradicts the whole.
    """
    if not is_wrapper(config):
        return config
    (wrapper,) = config["architectures"]
    text, kinds = config.get("text_config"), WRAPPERS[wrapper]
    if not isinstance(text, dict):
        raise ValueError(f"config.json: text_config must be an object where architectures is [{wrapper!r}]")
    kind = text.get("model_type", next(iter(kinds)))
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            f"config.json: model_type of text_config must be {' or '.join(kinds)} where architectures is "
            f"[{wrapper!r}], given {kind!r:.100}. {SUPPORTED}"
        )
    shared = {name: config[name] for name in _SHARED if name in config}
    # What generates is the whole, so its end of text goes before that of its part.
    end = {name: shared[name] for name in ("eos_token_id",) if shared.get(name) is not None}
    tied = [part["tie_word_embeddings"] for part in (text, shared) if "tie_word_embeddings" in part]
    if any(value != tied[0] for value in tied):
        raise ValueError("config.json: tie_word_embeddings of text_config contradicts that of the whole")
    return {**shared, **text, **end, "architectures": [kinds[kind]]}
