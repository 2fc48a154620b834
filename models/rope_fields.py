"""What a ``config.json`` says of rotary embeddings, checked before anything is made of it."""

from typing import Any

_BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")
_MAGNITUDES = ("attention_factor", "mscale", "mscale_all_dim")
_NUMBERS = {
    *("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale"),
    *("llama_4_scaling_beta", "mscale_all_dim", "rope_theta"),
}
# Parameters beside rope_parameters, whose place they have in older files -> their names there.
_AT_TOP = {
    "partial_rotary_factor": "partial_rotary_factor",
    "rope_local_base_freq": "rope_theta",
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_by_layer_type(config: dict[str, Any]) -> None:
    """``ValueError`` for a parsed ``config.json`` whose parameters are all outside those of layer types.

    transformers would look at none of them.
    """
    given = config.get("rope_parameters")
    if given and not given.keys() & {*_LAYER_TYPES}:
        raise ValueError(
            f"config.json: rope_parameters must be an object with {' and '.join(_LAYER_TYPES)}, given {given!r:.300}"
        )


def check_without_scaling(config: dict[str, Any]) -> None:
    """``ValueError`` for a parsed ``config.json`` with the name that older families have for ``rope_parameters``.

    transformers would put it into their place as it is.
    """
    if config.get("rope_scaling") is not None:
        raise ValueError(
            "config.json: rope_scaling must be left out for this architecture, which has rope_parameters, given "
            f"{config['rope_scaling']!r:.200}"
        )


def checked_ropes(config: dict[str, Any]) -> dict[str, Any]:
    """A parsed ``config.json`` with what it says of rotary embeddings checked, and bases as numbers: "1e4" is 10000.

    Raises:
        ValueError: parameters are no object, one has no value that it may have, or two fields contradict each other;
            the message names them.
    """
    plain = {name: _as_number(value) if name in _BASES else value for name, value in config.items()}
    for name in ("rope_parameters", "rope_scaling"):
        if plain.get(name) is not None:
            plain[name] = _checked(plain[name], name)
    for name, usual in _AT_TOP.items():
        value = plain.get(name)
        if value is not None or (name in plain and name != usual and not plain.get("rope_parameters")):
            check_value(usual, value, stated_as=name)
    new, old = plain.get("rope_parameters"), plain.get("rope_scaling")
    if new and old and new != old:
        raise ValueError(
            f"config.json: rope_parameters and rope_scaling contradict each other: {new!r:.200} and {old!r:.200}"
        )
    flat = new or old or {}
    for name in ("rope_theta", "original_max_position_embeddings"):
        inside, outside = flat.get(name), plain.get(name)
        if inside is not None and outside is not None and inside != outside:
            raise ValueError(f"config.json: {name} is both {outside!r:.100} and {inside!r:.100}")
    return plain


def _checked(parameters: Any, of: str) -> dict[str, Any]:
    """Also those of layer types, which are objects among them. What is null is left to who reads it."""
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: {of} must be an object, given {parameters!r:.200}")
    plain: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in _LAYER_TYPES and value is not None:
            plain[name] = _checked(value, f"{of} of {name}")
            continue
        plain[name] = _as_number(value) if name in _BASES else value
        if plain[name] is not None:
            check_value(name, plain[name], of)
    return plain


def _as_number(value: Any) -> Any:
    """The number that a string holds; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def check_value(name: str, value: Any, of: str = "", stated_as: str | None = None) -> None:
    """``ValueError`` for a value that the parameter ``name`` of ``of`` cannot have; those of other names may be any."""
    if name == "original_max_position_embeddings":
        allowed, is_valid = "a number above 1", is_positive(value) and value > 1
    elif name == "partial_rotary_factor":
        allowed, is_valid = "a number above 0, at most 1", is_positive(value) and value <= 1
    elif name == "truncate":
        allowed, is_valid = "true or false", isinstance(value, bool)
    elif name in ("short_factor", "long_factor"):
        allowed, is_valid = "a list of positive numbers", isinstance(value, list) and all(map(is_positive, value))
    else:
        most = 1e30 if name in _BASES else 1e3 if name in _MAGNITUDES else 1e6  # scores have a magnitude's square
        allowed = f"a positive number, at most {most:g}"
        is_valid = name not in _NUMBERS or (is_positive(value) and value <= most)
    if not is_valid:
        raise ValueError(
            f"config.json: {stated_as or name} must be {allowed}{of and f' (in {of})'}, given {value!r:.100}"
        )


def is_positive(value: Any) -> bool:
    """Whether it is a number that float32 holds, above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-30 <= value <= 1e30
