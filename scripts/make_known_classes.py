"""Write models/known_classes.json: what transformers' config classes do, found by trying each field of each class.

    python scripts/make_known_classes.py

It is to be run again with each version of transformers that constraints.txt names, and after a change of a family's
``hf_config`` or ``old_fields``. Exit status: 0, or 1 with ``--check`` if the file is out of date.
"""

import copy
import json
import sys
from typing import Any

import own_checkout
import transformers

from compiled_llm.api.command_line import FlagParser
from compiled_llm.models.config_fields import LEFT_OUT, class_parameters, filled
from compiled_llm.models.known_classes import BY_LAYER, FLAT, FULL, HEADS, OLD, PARTIAL, SCALED, TABLE, WIDTH
from compiled_llm.models.registry import ARCHITECTURES, family

_OTHERS = ("rope_scaling", "rope_theta")
_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")  # that the rules for null count with
_PLAIN = {"rope_type": "default", "rope_theta": 3.0}
_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 3.0}


def table() -> dict[str, Any]:
    """The content of the file."""
    others: dict[str, set[str]] = {}
    for one in map(family, ARCHITECTURES):
        others.setdefault(one.hf_config, set()).update(one.old_fields)
    classes = {name: found(getattr(transformers, name), sorted(others[name])) for name in sorted(others)}
    common = set.intersection(*(set(one["attributes"]) for one in classes.values()))
    for one in classes.values():
        one["attributes"] = sorted(set(one["attributes"]) - common)
    return {"transformers": transformers.__version__, "attributes": sorted(common), "classes": classes}


def found(config_class: Any, others: list[str]) -> dict[str, Any]:
    """What the table says of one class, its attributes in full. ``others``: fields that families read besides."""
    parameters = {n: value for n, value in class_parameters(config_class).items() if n not in LEFT_OUT}
    types = {name: _type(config_class.__dataclass_fields__[name].type) for name in parameters}
    usual = _Tried(config_class, {})
    changes, depends, untried = set[str](), dict[str, set[str]](), set[str]()
    nullable = [name for name in parameters if "None" in types[name].split(" | ")]
    fills = {name for name in nullable if not _Tried(config_class, {name: None}).keeps(name)}
    ropes = _ropes(config_class)
    kept_ropes = [_rope_tries(config_class)[way] for way in ropes if way != OLD]
    for name, value in parameters.items():
        if value is not None and not usual.keeps(name):
            changes.add(name)
        tries = _other_values(config_class, name, value, types[name].split(" | "))
        if not tries:
            untried.add(name)
        for other in tries:
            tried = _Tried(config_class, {name: other})
            if not tried.keeps(name):
                changes.add(name)
            for altered in parameters.keys() - {name, "rope_parameters"}:
                is_filled = parameters[altered] is None and name in _SIZES
                if tried.made is not None and not is_filled and tried.value(altered) != usual.value(altered):
                    depends.setdefault(altered, set()).add(name)
            if tried.made is not None and any(_alters(config_class, name, other, given) for given in kept_ropes):
                depends.setdefault("rope_parameters", set()).add(name)
    filling = {name: _filling(config_class, name) for name in sorted(fills)}
    for name in [name for name, what in filling.items() if what]:
        depends[name] = depends.get(name, set()) | untried - {name}
    return {
        "model_type": config_class.model_type,
        "attribute_map": config_class.attribute_map,
        "parameters": class_parameters(config_class),
        "types": types,
        "checked": sorted(name for name in parameters if len(config_class.__validators__.get(name, ())) > 1),
        "even": _refuses_uneven(config_class),
        "fills": filling,
        "changes": sorted(changes | untried - {"rope_parameters"}),
        "depends": {name: sorted(on) for name, on in sorted(depends.items())},
        "others": [name for name in others if _takes(config_class, name, usual)],
        "ropes": ropes,
        "attributes": sorted(n for n in dir(config_class()) if not n.startswith("_") and n not in parameters),
    }


def _type(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) else str(declared)


class _Tried:
    """What a class makes of ``given``; ``made`` is None where it refuses that."""

    def __init__(self, config_class: Any, given: dict[str, Any]) -> None:
        self.given = {**class_parameters(config_class), **given}
        try:
            self.made = filled(copy.deepcopy(given), config_class, _OTHERS)
        except ValueError:
            self.made = None

    def value(self, name: str) -> Any:
        """Of a field; ``...`` where there is none."""
        try:
            return ... if self.made is None else getattr(self.made, name)
        except Exception:  # some raise errors of their own, for fields with a value for each layer
            return ...

    def keeps(self, name: str) -> bool:
        """Whether a field is what was given."""
        given, found = self.given[name], self.value(name)
        return found == given and type(found) is type(given)


def _other_values(config_class: Any, name: str, value: Any, kinds: list[str]) -> list[Any]:
    """Values of a field beside its default ``value``; none for types that are not tried."""
    if name == "rope_parameters":
        return [_PLAIN]
    if name == "layer_types":
        count = config_class().num_hidden_layers
        return [[FULL] * count, ["sliding_attention"] * count, [FULL, "sliding_attention"] * (count // 2)]
    if isinstance(value, bool) or (value is None and "bool" in kinds):
        return [not value]
    if "int" in kinds:
        return [2 * value if value else 24]
    if "float" in kinds:
        return [value / 2 if value else 0.5]
    if "str" in kinds:
        return ["gelu" if "act" in name else "x"]
    return [[], [1]] if "list[int]" in kinds else []


def _takes(config_class: Any, name: str, usual: _Tried) -> bool:
    """Whether a field that the class does not declare becomes an attribute, and does nothing else."""
    if name in class_parameters(config_class) or usual.value(name) is not ...:
        return False
    try:
        made = filled({name: 24}, config_class, (*_OTHERS, name))
    except ValueError:
        return False
    declared = [n for n in class_parameters(config_class) if usual.value(n) is not ...]
    return getattr(made, name, None) == 24 and all(getattr(made, n) == usual.value(n) for n in declared)


def _filling(config_class: Any, name: str) -> str:
    """What stands in the place of null, if it does so for other sizes."""
    found = set()
    for heads, hidden, count in ((6, 240, 5), (10, 240, 8), *(() if _refuses_uneven(config_class) else ((7, 240, 8),))):
        sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": count}
        value = _Tried(config_class, {**_sizes(config_class, sizes), name: None}).value(name)
        known = {HEADS: heads, WIDTH: hidden // heads, FULL: [FULL] * count}
        found.add(next((what for what, expected in known.items() if value == expected), ""))
    return found.pop() if len(found) == 1 else ""


def _refuses_uneven(config_class: Any) -> bool:
    """Whether it refuses a hidden size that is no multiple of the number of heads."""
    sizes = _sizes(config_class, {"hidden_size": 241, "num_attention_heads": 6})
    return _Tried(config_class, sizes).made is None


def _sizes(config_class: Any, sizes: dict[str, int]) -> dict[str, int]:
    """By the class's own names."""
    return {config_class.attribute_map.get(size, size): value for size, value in sizes.items()}


def _ropes(config_class: Any) -> list[str]:
    """The ways to give rotary embeddings that the class keeps."""

    def made(**given: Any) -> Any:
        return _Tried(config_class, given).value("rope_parameters")

    scaling = {name: value for name, value in _YARN.items() if name != "rope_theta"}
    kept = {way: made(**given) == given["rope_parameters"] for way, given in _rope_tries(config_class).items()}
    kept[OLD] = made(rope_theta=3.0) == _PLAIN and made(rope_theta=3.0, rope_scaling=scaling) == _YARN
    return [way for way in (FLAT, PARTIAL, OLD, SCALED, BY_LAYER) if kept[way]]


def _rope_tries(config_class: Any) -> dict[str, dict[str, Any]]:
    """Way to give rotary embeddings -> fields that do so."""
    kinds = ("sliding_attention", FULL)
    count = getattr(config_class(), "num_hidden_layers", 0)
    types = [kinds[0]] * (count - 1) + [kinds[1]]
    partial = {**_PLAIN, "partial_rotary_factor": 0.5}
    by_layer = {kinds[0]: {"rope_type": "default", "rope_theta": 5.0}, kinds[1]: _YARN}
    return {
        FLAT: {"rope_parameters": _PLAIN},
        PARTIAL: {"rope_parameters": partial},
        SCALED: {"rope_parameters": _YARN},
        BY_LAYER: {"rope_parameters": by_layer, "layer_types": types},
    }


def _alters(config_class: Any, name: str, value: Any, ropes: dict[str, Any]) -> bool:
    """Whether a field's value changes rotary embeddings that are given beside it, or is refused then."""
    beside = {name: value, **ropes}  # a field that these give keeps their value
    if name == "num_hidden_layers" and "layer_types" in ropes:  # as many types, and the last one is there
        beside["layer_types"] = ropes["layer_types"][:1] * (value - 1) + ropes["layer_types"][-1:]
    tried = _Tried(config_class, beside)
    return tried.value("rope_parameters") != ropes["rope_parameters"]


def main() -> int:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; print whether the file is out of date")
    args = parser.parse_args()
    text = json.dumps(table(), indent=1, sort_keys=True) + "\n"
    is_stale = not TABLE.exists() or TABLE.read_text() != text
    if is_stale:
        print(f"{TABLE.name} {'is out of date: run python scripts/make_known_classes.py' if args.check else 'written'}")
    if is_stale and not args.check:
        TABLE.write_text(text)
    return 1 if args.check and is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
