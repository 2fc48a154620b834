"""Checkpoints of models with more than text: of their ``config.json`` the part that is the language model's."""

from typing import Any

from compiled_llm.models.registry import SUPPORTED, WRAPPERS

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
