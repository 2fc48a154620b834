"""What a ``config.json`` says of rotary embeddings (Su et al., 2021)."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """``rope_type: "linear"``: positions divided by ``factor`` (Chen et al., 2023, arXiv:2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """``rope_type: "llama3"`` of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclasses.dataclass(frozen=True)
class YarnRopeScaling:
    """``rope_type: "yarn"`` (Peng et al., 2023, arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: float
    beta_fast: float
    beta_slow: float
    truncate: bool  # whether the bounds of the ramp are rounded to whole frequencies


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """``rope_type: "longrope"`` (Ding et al., 2024, arXiv:2402.13753): a divisor for each frequency.

    ``long_factor`` is for texts longer than ``original_max_position_embeddings``.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: float


@dataclasses.dataclass(frozen=True)
class ProportionalRope:
    """``rope_type: "proportional"`` of Gemma 4: frequencies of a whole head, divided by ``factor``.

    The fastest ``share`` of the pairs is turned by them.
    """

    share: float
    factor: float


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling | ProportionalRope

# Kind -> the fields that it needs, and those that it may have. Kinds and fields are transformers'.
_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings"},
        {"attention_factor", "factor"},
    ),
    "proportional": (set(), {"factor", "partial_rotary_factor"}),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Base and scaling of the frequencies, and which elements of a head they turn.

    Attributes:
        partial: the share of a head's elements that are turned, the first ones.
        interleaved: each of them is paired with its neighbour, not with the one that is half of them away.
        attention_factor: of cosines and sines, so of queries and keys.
        precise: angles are computed in float64, for positions far beyond those that models are trained with; else in
            float32, as transformers does.
        score_factor: multiplies the scores, without a part in the angles (DeepSeek's ``mscale_all_dim``).
        query_beta: a query at position p is multiplied by ``1 + query_beta * log(1 + floor(p / original length))``.
    """

    theta: float
    scaling: RopeScaling | None = None
    partial: float = 1.0
    interleaved: bool = False
    attention_factor: float = 1.0
    precise: bool = False
    query_beta: float = 0.0
    score_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many elements of a head are turned. ``ValueError`` unless they are pairs."""
        turned = int(head_dim * self.partial)
        if turned < 2 or turned % 2:
            raise ValueError(
                "config.json: partial_rotary_factor must turn an even number of a head's elements, given "
                f"{self.partial}, which is {turned} of {head_dim}"
            )
        return turned

    def check(self, head_dim: int) -> None:
        """``ValueError`` where it does not fit heads of ``head_dim`` elements."""
        turned = self.rotary_dim(head_dim)
        if not isinstance(self.scaling, LongRopeScaling):
            return
        for name in ("short_factor", "long_factor"):
            given = len(getattr(self.scaling, name))
            if given != turned // 2:
                raise ValueError(
                    f"config.json: {name} must have a number for each of the {turned // 2} frequencies, given {given}"
                )


def read_rope(config: dict[str, Any], *, default_theta: float = 10000.0) -> Rope:
    """The rotary embeddings of a parsed ``config.json``.

    ``rope_type: "dynamic"`` scales texts longer than ``max_position_embeddings`` alone, which the engine refuses: so it
    is no scaling.

    Args:
        default_theta: where the file has none.

    Raises:
        ValueError: a kind or field is not supported; the message names it.
    """
    parameters = _parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    own = {name: value for name, value in parameters.items() if name not in ("rope_type", "type", "rope_theta")}
    partial = None if kind == "proportional" else own.pop("partial_rotary_factor", None)
    if partial not in (None, 1):
        raise ValueError(
            f"config.json: partial_rotary_factor must be 1 for this architecture, given {partial!r:.100}: the model is "
            "not supported"
        )
    scaling, theta = _scaling(config, kind, own), _theta(config, parameters, default_theta)
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"config.json: rope_theta must be above 1 for rope_type 'yarn', given {theta}")
    return Rope(theta, scaling, attention_factor=_attention_factor(config, scaling, own))


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


def read_latent_rope(config: dict[str, Any], *, interleaved: bool) -> Rope:
    """The rotary embeddings of latent attention, whose turned part stands by itself; ``score_factor`` by yarn's fields.

    Args:
        interleaved: each element is paired with its neighbour.
    """
    rope = dataclasses.replace(read_rope(config), interleaved=interleaved)
    slope = _parameters(config).get("mscale_all_dim")
    if not slope or not isinstance(rope.scaling, YarnRopeScaling):
        return rope
    return dataclasses.replace(rope, score_factor=_magnitude(rope.scaling.factor, slope) ** 2)


def read_query_scale(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """``Rope.query_beta`` of a parsed ``config.json``, and the file without it, for ``read_rope``. The kind is yarn."""
    parameters = _parameters(config)
    beta, kind = parameters.get("llama_4_scaling_beta"), parameters.get("rope_type", parameters.get("type"))
    if kind != "yarn" or not _is_positive(beta):
        raise ValueError(
            "config.json: rope_parameters must have rope_type 'yarn' and a positive llama_4_scaling_beta for this "
            f"architecture, given {kind!r:.100} and {beta!r:.100}"
        )
    # The length beside it is that of the whole config, which nothing reads there.
    own = ("llama_4_scaling_beta", "max_position_embeddings")
    rest = {name: value for name, value in parameters.items() if name not in own}
    return float(parameters["llama_4_scaling_beta"]), {**config, "rope_parameters": rest, "rope_scaling": None}


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


def _theta(config: dict[str, Any], rope: dict[str, Any], default: float) -> float:
    theta = rope.get("rope_theta", config.get("rope_theta", default))
    if not _is_positive(theta):
        raise ValueError(f"config.json: rope_theta must be a positive number, given {theta!r:.100}")
    return float(theta)


def _scaling(config: dict[str, Any], kind: Any, given: dict[str, Any]) -> RopeScaling | None:
    """``given``: the parameters, without kind and base."""
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(
            f"config.json: rope scaling of rope_type {kind!r:.100} is not supported; allowed: {', '.join(_FIELDS)}"
        )
    needed, optional = _FIELDS[kind]
    if "original_max_position_embeddings" in needed:
        given = {**given, "original_max_position_embeddings": _original_length(config, given)}
    fields = {name: value for name, value in given.items() if value is not None or name in needed}
    if kind == "yarn" and fields.get("factor") is None:
        fields["factor"] = _length_ratio(config, fields)
    if not needed <= fields.keys() <= needed | optional or not all(map(_is_valid, fields.items())):
        raise ValueError(
            f"config.json: rope scaling {given!r:.300} is not supported; allowed for rope_type {kind!r}: "
            f"{', '.join(sorted(needed)) or 'no other field'}{' and maybe ' * bool(optional)}"
            f"{', '.join(sorted(optional))}; all positive numbers and lengths above 1, but for truncate, and for "
            "short_factor and long_factor, which are lists of numbers"
        )
    if kind == "linear":
        return LinearRopeScaling(float(fields["factor"]))
    if kind == "llama3":
        if fields["high_freq_factor"] <= fields["low_freq_factor"]:
            raise ValueError(
                f"config.json: high_freq_factor must be above low_freq_factor in rope scaling, given {given!r:.300}"
            )
        return Llama3RopeScaling(**{name: float(value) for name, value in fields.items()})
    if kind == "yarn":
        return YarnRopeScaling(
            factor=float(fields["factor"]),
            original_max_position_embeddings=float(fields["original_max_position_embeddings"]),
            beta_fast=float(fields.get("beta_fast", 32)),
            beta_slow=float(fields.get("beta_slow", 1)),
            truncate=fields.get("truncate", True),
        )
    if kind == "proportional":
        share, factor = (float(fields.get(name, 1)) for name in ("partial_rotary_factor", "factor"))
        if share > 1:
            raise ValueError(f"config.json: partial_rotary_factor must be at most 1, given {share}")
        return ProportionalRope(share, factor)
    if kind == "longrope":
        return LongRopeScaling(
            short_factor=tuple(map(float, fields["short_factor"])),
            long_factor=tuple(map(float, fields["long_factor"])),
            original_max_position_embeddings=float(fields["original_max_position_embeddings"]),
        )
    return None


def _original_length(config: dict[str, Any], given: dict[str, Any]) -> Any:
    """The length that the model was first trained with. Outside of the parameters it would override theirs."""
    outside, inside = (x.get("original_max_position_embeddings") for x in (config, given))
    if outside is not None and inside is not None and outside != inside:
        raise ValueError(f"config.json: original_max_position_embeddings is both {outside!r:.100} and {inside!r:.100}")
    found = inside if outside is None else outside
    return config.get("max_position_embeddings") if found is None else found


def _length_ratio(config: dict[str, Any], given: dict[str, Any]) -> float:
    longest, original = config.get("max_position_embeddings"), given.get("original_max_position_embeddings")
    if not _is_positive(longest) or not _is_positive(original):
        raise ValueError(
            "config.json: max_position_embeddings and original_max_position_embeddings must be positive numbers where "
            f"rope scaling has no factor, given {longest!r:.100} and {original!r:.100}"
        )
    assert longest is not None
    assert original is not None
    return longest / original


def _attention_factor(config: dict[str, Any], scaling: RopeScaling | None, given: dict[str, Any]) -> float:
    """The one that is given, or what the papers say."""
    if not isinstance(scaling, YarnRopeScaling | LongRopeScaling):
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    original = scaling.original_max_position_embeddings
    if isinstance(scaling, LongRopeScaling):
        factor = given.get("factor") or _length_ratio(config, {"original_max_position_embeddings": original})
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if above and below:
        return _magnitude(scaling.factor, above) / _magnitude(scaling.factor, below)
    return _magnitude(scaling.factor, 1.0)


def _magnitude(factor: float, slope: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0


def _is_valid(field: tuple[str, Any]) -> bool:
    name, value = field
    if name == "original_max_position_embeddings":
        return _is_positive(value) and value > 1
    if name == "truncate":
        return isinstance(value, bool)
    if name in ("short_factor", "long_factor"):
        return isinstance(value, list) and all(map(_is_positive, value))
    return _is_positive(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-30 <= value <= 1e30
