"""Numbers of a ``config.json`` that are checked before anything is made of them."""

from typing import Any

# The largest value of each size. Checked before transformers sees them: its classes make lists of some lengths.
MOST = {
    "num_hidden_layers": 1024,
    "head_dim": 2**16,
    "hidden_size": 2**24,
    "intermediate_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "vocab_size": 2**24,
}


def check_size(name: str, value: Any, stated_as: str | None = None) -> None:
    """``ValueError`` unless ``value`` is an integer from 1 to the largest that ``name`` may be.

    ``stated_as``: the name that the file has for it, if another.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST[name]:
        raise ValueError(
            f"config.json: {stated_as or name} must be an integer from 1 to {MOST[name]}, given {value!r:.100}"
        )


def check_given_sizes(config: dict[str, Any], config_class: Any) -> None:
    """The same of each size that a parsed ``config.json`` gives, by the names of transformers' class or its usual one.

    Beforehand: the class makes lists of some lengths, of which null is left to it.
    """
    for name in MOST:
        for given in [
            one for one in dict.fromkeys((config_class.attribute_map.get(name, name), name)) if one in config
        ]:
            if config[given] is not None:
                check_size(name, config[given], given)


def eos_token_ids(config: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The end-of-text ids of ``config.json`` and ``generation_config.json``. ``ValueError`` for one that is none."""
    ids = set()
    for name, source in (("config.json", config), ("generation_config.json", generation)):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name}: eos_token_id must be a token id or a list of them, from 0 to {vocab_size - 1} (one below "
                    f"config.json's vocab_size), given {value!r:.200}"
                )
            ids.add(token)
    return tuple(sorted(ids))
