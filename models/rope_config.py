"""What a ``config.json`` says of rotary embeddings (Su et al., 2021)."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """``rope_type: "llama3"`` of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Base and scaling of the frequencies, and which elements of a head they turn.

    Attributes:
        partial: the share of a head's elements that are turned, the first ones.
        interleaved: each of them is paired with its neighbour, not with the one that is half of them away.
    """

    theta: float
    scaling: Llama3RopeScaling | None
    partial: float = 1.0
    interleaved: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are turned. ``ValueError`` unless they are pairs."""
        turned = int(head_dim * self.partial)
        if turned < 2 or turned % 2:
            raise ValueError(
                "config.json: partial_rotary_factor must turn an even number of a head's elements, given "
                f"{self.partial}, which is {turned} of {head_dim}"
            )
        return turned


def read_rope(config: dict[str, Any]) -> Rope:
    """The rotary embeddings of a parsed ``config.json``. ``ValueError`` for kinds that are not supported."""
    parameters = _parameters(config)
    rope = Rope(_theta(config, parameters), _scaling(parameters))
    # Beside the other parameters it would override theirs.
    outside = config.get("original_max_position_embeddings")
    if outside is not None and rope.scaling and outside != rope.scaling.original_max_position_embeddings:
        raise ValueError(
            f"config.json: original_max_position_embeddings is both {outside!r:.100} and "
            f"{rope.scaling.original_max_position_embeddings!r}"
        )
    return rope


def read_partial_rope(config: dict[str, Any], default: float) -> Rope:
    """The same where ``partial_rotary_factor`` says which share of a head is turned, ``default`` if it is left out."""
    parameters = _parameters(config)
    factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", default))
    if not _is_positive(factor) or factor > 1:
        raise ValueError(
            f"config.json: partial_rotary_factor must be a number above 0, at most 1, given {factor!r:.100}"
        )
    whole = {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}
    rope = read_rope({**config, "rope_parameters": whole, "rope_scaling": None})
    return dataclasses.replace(rope, partial=float(factor))


def read_ropes_by_layer_type(config: dict[str, Any], thetas: dict[str, Any]) -> tuple[Rope, ...]:
    """The rotary embeddings of a parsed ``config.json`` whose layers have one for each of their types.

    Args:
        thetas: layer type -> the base, where ``rope_parameters`` names none. An older checkpoint's ``rope_scaling`` is
            that of the first type.

    Returns:
        One for each of ``thetas``, in their order.
    """
    given, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(given, dict) or not given.keys() <= thetas.keys():
        raise ValueError(
            f"config.json: rope_parameters must be an object with {' and '.join(thetas)}, given {given!r:.300}"
        )
    if given and old:
        raise ValueError(f"config.json: rope_scaling must be left out beside rope_parameters, given {old!r:.200}")
    ropes = []
    for kind, theta in thetas.items():
        parameters = given.get(kind) or old
        if not isinstance(parameters, dict):
            raise ValueError(f"config.json: the rope parameters of {kind} must be an object, given {parameters!r:.200}")
        of_kind = {"rope_parameters": {"rope_theta": theta, **parameters}, "rope_scaling": None}
        ropes.append(read_rope({**{name: config[name] for name in config.keys() - {"rope_theta"}}, **of_kind}))
        old = {}
    return tuple(ropes)


def _parameters(config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; earlier checkpoints have rope_scaling beside rope_theta.
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_parameters must be an object, given {rope!r:.200}")
    if new and old and new != old:
        raise ValueError(
            f"config.json: rope_parameters and rope_scaling contradict each other: {new!r:.200} and {old!r:.200}"
        )
    if "rope_theta" in rope and config.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
        raise ValueError(
            f"config.json: rope_theta is both {config['rope_theta']!r:.100} and {rope['rope_theta']!r:.100}"
        )
    return rope


def _theta(config: dict[str, Any], rope: dict[str, Any]) -> float:
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if not _is_positive(theta):
        raise ValueError(f"config.json: rope_theta must be a positive number, given {theta!r:.100}")
    return float(theta)


def _scaling(rope: dict[str, Any]) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields = {name: value for name, value in rope.items() if name not in ("rope_type", "type", "rope_theta")}
    if kind == "default" and not fields:
        return None
    expected = {field.name for field in dataclasses.fields(Llama3RopeScaling)}
    if kind == "llama3" and set(fields) == expected and all(_is_positive(value) for value in fields.values()):
        scaling = Llama3RopeScaling(**{name: float(value) for name, value in fields.items()})  # type: ignore[arg-type]
        if scaling.high_freq_factor > scaling.low_freq_factor:
            return scaling
    raise ValueError(
        f"config.json: rope scaling {rope!r:.300} is not supported; allowed: rope_type 'default' with no other field, "
        f"or 'llama3' with positive numbers as {', '.join(sorted(expected))} and high_freq_factor above low_freq_factor"
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-30 <= value <= 1e30
