"""What a ``config.json`` says of rotary embeddings (Su et al., 2021): checked first, then read."""

import dataclasses
import math
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


def read_rope(parameters: Any, longest: int, *, of: str = "rope_parameters") -> Rope:
    """One rotary embedding, as transformers' config class has it: with its kind and base, old names made new.

    ``rope_type: "dynamic"`` scales texts longer than ``longest`` alone, which the engine refuses: so it is no scaling.

    Args:
        parameters: ``rope_parameters`` of transformers' config, or those of one kind of layers.
        longest: ``max_position_embeddings``.
        of: what ``parameters`` are, for messages.

    Raises:
        ValueError: a kind or field is not supported; the message names it.
    """
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: {of} must be an object, given {parameters!r:.200}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(
            f"config.json: rope scaling of rope_type {kind!r:.100} is not supported; allowed: {', '.join(_FIELDS)}"
        )
    own = {name: value for name, value in parameters.items() if name not in ("rope_type", "type", "rope_theta")}
    partial = 1 if kind == "proportional" else own.pop("partial_rotary_factor", 1)
    if partial != 1:
        raise ValueError(
            f"config.json: partial_rotary_factor must be 1 for rope_type {kind!r} of this architecture, given "
            f"{partial!r:.100}: the model is not supported"
        )
    theta: Any = parameters.get("rope_theta")
    check_value("rope_theta", theta, of)
    scaling = _scaling(kind, own, longest)
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"config.json: rope_theta must be above 1 for rope_type 'yarn', given {theta}")
    return Rope(float(theta), scaling, attention_factor=_attention_factor(scaling, own, longest))


def read_partial_rope(parameters: Any, longest: int) -> Rope:
    """The same where ``partial_rotary_factor`` says which share of a head is turned."""
    factor = parameters.get("partial_rotary_factor", 1.0)
    check_value("partial_rotary_factor", factor, "rope_parameters")
    whole = {name: value for name, value in parameters.items() if name != "partial_rotary_factor"}
    return dataclasses.replace(read_rope(whole, longest), partial=float(factor))


def read_latent_rope(parameters: Any, longest: int, *, interleaved: bool) -> Rope:
    """The rotary embeddings of latent attention, whose turned part stands by itself; ``score_factor`` by yarn's fields.

    Args:
        parameters, longest: as for ``read_rope``.
        interleaved: each element is paired with its neighbour.
    """
    rope = dataclasses.replace(read_rope(parameters, longest), interleaved=interleaved)
    slope = parameters.get("mscale_all_dim")
    if not slope or not isinstance(rope.scaling, YarnRopeScaling):
        return rope
    check_value("factor", parameters["factor"], "rope_parameters")  # transformers' model has no other here
    return dataclasses.replace(rope, score_factor=_magnitude(rope.scaling.factor, slope) ** 2)


def read_query_scale(parameters: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """``Rope.query_beta`` of transformers' ``rope_parameters``, and these without it. The kind is yarn."""
    beta, kind = parameters.get("llama_4_scaling_beta"), parameters.get("rope_type")
    if kind != "yarn" or not is_positive(beta):
        raise ValueError(
            "config.json: rope_parameters must have rope_type 'yarn' and a positive llama_4_scaling_beta for this "
            f"architecture, given {kind!r:.100} and {beta!r:.100}"
        )
    # The length beside it is that of the whole config, which nothing reads there.
    own = ("llama_4_scaling_beta", "max_position_embeddings")
    return float(parameters["llama_4_scaling_beta"]), {k: v for k, v in parameters.items() if k not in own}


def read_ropes_by_layer_type(given: Any, kinds: tuple[str, ...], longest: int) -> tuple[Rope, ...]:
    """Rotary embeddings of which each type of layers has its own.

    What stands beside them, as the flat parameters of other versions, transformers does not look at; but for
    ``truncate``, which it takes from there alone.

    Args:
        given: ``rope_parameters`` of transformers' config.
        kinds: types of layers.
        longest: as for ``read_rope``.

    Returns:
        One for each of ``kinds``, in their order.
    """
    if not isinstance(given, dict) or not given.keys() >= {*kinds}:
        raise ValueError(
            f"config.json: rope_parameters must be an object with {' and '.join(kinds)}, given {given!r:.300}"
        )
    ropes = []
    for kind in kinds:
        rope = read_rope(given[kind], longest, of=f"rope_parameters of {kind}")
        truncate = given.get("truncate", True)
        if isinstance(rope.scaling, YarnRopeScaling) and rope.scaling.truncate is not truncate:
            raise ValueError(
                f"config.json: truncate among the rope_parameters of {kind} must be {truncate!r:.100}, as it is beside "
                f"them, where transformers' model looks for it, given {rope.scaling.truncate}"
            )
        ropes.append(rope)
    return tuple(ropes)


def _scaling(kind: str, given: dict[str, Any], longest: int) -> RopeScaling | None:
    """``given``: the parameters, without kind and base."""
    needed, optional = _FIELDS[kind]
    # What transformers takes for absent where it is null.
    nullable = optional - {"truncate"} if kind in ("yarn", "longrope") else set()
    fields = {name: value for name, value in given.items() if value is not None or name not in nullable}
    original: Any = fields.get("original_max_position_embeddings")
    if kind == "yarn" and fields.get("factor") is None and is_positive(original):
        fields["factor"] = longest / original
    if not needed <= fields.keys() <= needed | optional:
        raise ValueError(
            f"config.json: rope scaling {given!r:.300} is not supported; allowed for rope_type {kind!r}: "
            f"{', '.join(sorted(needed)) or 'no other field'}{' and maybe ' * bool(optional)}"
            f"{', '.join(sorted(optional))}"
        )
    for name, value in fields.items():
        check_value(name, value, "rope_parameters")
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
        return ProportionalRope(*(float(fields.get(name, 1)) for name in ("partial_rotary_factor", "factor")))
    if kind == "longrope":
        return LongRopeScaling(
            short_factor=tuple(map(float, fields["short_factor"])),
            long_factor=tuple(map(float, fields["long_factor"])),
            original_max_position_embeddings=float(fields["original_max_position_embeddings"]),
        )
    return None


def _attention_factor(scaling: RopeScaling | None, given: dict[str, Any], longest: int) -> float:
    """The one that is given, or what the papers say."""
    if not isinstance(scaling, YarnRopeScaling | LongRopeScaling):
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    original = scaling.original_max_position_embeddings
    if isinstance(scaling, LongRopeScaling):
        factor = given.get("factor") or longest / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    if above and below:
        return _magnitude(scaling.factor, above) / _magnitude(scaling.factor, below)
    return _magnitude(scaling.factor, 1.0)


def _magnitude(factor: float, slope: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0
