"""What is known of transformers' config classes without importing them, which takes 1.5 processor seconds.

``known_classes.json`` has their fields, defaults and types, and which values they keep as they are given. It is written
from the classes by ``scripts/make_known_classes.py``, for one version of transformers: beside any other it is not used.
Whatever it does not say is ``NotKnown``. Then the class itself is asked, so a config is read alike with and without it.

Rules that are written here by hand, since they take several fields: which forms of rotary embeddings are complete
(``_NEEDED``), that ``layer_types`` has a known type for each layer, that null may not stand for a field that the class
does not declare, and what the heads' number, their width and layers' types stand in for (``HEADS``, ``WIDTH``,
``FULL``). Which of these last a class follows, and which forms it keeps, is in the table.
"""

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("known_classes.json")
HEADS, WIDTH, FULL = "num_attention_heads", "hidden_size // num_attention_heads", "full_attention"
"""What a class puts in the place of null: the number of heads, an even share of the hidden size, or a layer's type."""
FLAT, PARTIAL, OLD, SCALED, BY_LAYER = "flat", "partial", "old", "scaled", "by_layer"
"""Ways to give rotary embeddings that a class leaves as they are: ``rope_parameters``; the same with
``partial_rotary_factor``; ``rope_theta`` and ``rope_scaling`` in their place; any of these with scaling;
``rope_parameters`` of each type of layers, with scaling or without."""
_LENGTH = "original_max_position_embeddings"  # transformers adds it where it is left out
# Kind of rotary embedding -> what it needs beside rope_theta.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (_LENGTH, "factor"),
    "longrope": (_LENGTH,),
    "yarn": (_LENGTH, "factor"),
}
_LAYER_TYPES = {FULL, "sliding_attention", "conv", "linear_attention"}
_OLD_ROPES = {"rope_scaling", "rope_theta"}
_KINDS = {"bool": bool, "float": float, "int": int, "None": type(None), "str": str}


class NotKnown(Exception):
    """Only transformers' class can say."""


@dataclasses.dataclass(frozen=True)
class KnownClass:
    """One of transformers' config classes.

    Attributes:
        name: of the class.
        model_type, attribute_map: as it has them.
        parameters: field -> default, of every field that it takes.
        types: field -> the type that it declares, such as "int | None"; of those that the class is asked about.
        checked: fields of which it checks more than the type.
        even: whether it refuses a hidden size that is no multiple of the number of heads.
        fills: field -> what it puts in the place of null: ``HEADS``, ``WIDTH``, ``FULL``, or "" for anything else.
        changes: fields whose values it may change.
        depends: field -> those whose values, unless they are the defaults, may change it; ``rope_parameters`` as
            they are given.
        others: fields that it does not declare, which are attributes where they are given, and do nothing else.
        ropes: of ``FLAT``, ``PARTIAL``, ``OLD``, ``SCALED`` and ``BY_LAYER`` those that hold.
        attributes: what its objects have besides.
    """

    name: str
    model_type: str
    attribute_map: Mapping[str, str]
    parameters: Mapping[str, Any]
    types: Mapping[str, str]
    checked: Collection[str]
    even: bool
    fills: Mapping[str, str]
    changes: Collection[str]
    depends: Mapping[str, Collection[str]]
    others: Collection[str]
    ropes: Collection[str]
    attributes: Collection[str]

    def check_types(self, config: dict[str, Any]) -> None:
        """``NotKnown`` unless each field of a parsed ``config.json`` has its default, or plainly the declared type.

        Of fields whose values the class checks besides, only the default is known.
        """
        for name in config.keys() & self.types.keys():
            value = config[name]
            if value == self.parameters[name] and type(value) is type(self.parameters[name]):
                continue
            plain = any(_is_of(value, kind) for kind in self.types[name].split(" | "))
            if not plain or name in self.checked:
                raise NotKnown(name)

    def filled(self, config: dict[str, Any], others: Collection[str]) -> "KnownValues":
        """What the class makes of a parsed ``config.json`` whose types are checked.

        Args:
            others: names of fields that the class does not declare, and acts on.

        Raises:
            NotKnown: the class might refuse the fields, or act on one of ``others``.
        """
        beside = {name for name in others if name in config} - self.parameters.keys()
        nulls = {name for name in beside if config[name] is None and name != "rope_scaling"}
        if nulls or beside - {*_OLD_ROPES, *self.others}:
            raise NotKnown(*beside)
        full = KnownValues(self, config)
        if self.even and full.hidden_size % full.num_attention_heads:
            raise NotKnown("hidden_size")
        types = config.get("layer_types")
        if types is not None and (len(types) != full.num_hidden_layers or not _LAYER_TYPES.issuperset(types)):
            raise NotKnown("layer_types")
        return full


class KnownValues:
    """A config as transformers' class makes it: an attribute for each field. ``NotKnown`` where it cannot be said."""

    def __init__(self, config_class: KnownClass, given: dict[str, Any]) -> None:
        self._class, self._given = config_class, given

    def __getattr__(self, name: str) -> Any:
        known = self._class
        if name not in known.parameters:
            name = known.attribute_map.get(name, name)
        if name in known.others and self._given.get(name) is not None:
            return self._given[name]
        if name not in known.parameters:
            raise NotKnown(name) if name in known.attributes else AttributeError(name)
        if any(self._has_another(other) for other in known.depends.get(name, ())):
            raise NotKnown(name)
        if name == "rope_parameters":
            return self._ropes()
        value = self._given.get(name, known.parameters[name])
        if value is None and name in known.fills:
            return self._in_place_of_null(known.fills[name])
        if value is not None and name in known.changes:
            raise NotKnown(name)
        return value

    def _has_another(self, name: str) -> bool:
        """Than the default."""
        return name in self._given and self._given[name] != self._class.parameters[name]

    def _in_place_of_null(self, what: str) -> Any:
        if what == HEADS:
            return self.num_attention_heads
        if what == WIDTH:
            return self.hidden_size // self.num_attention_heads
        if what == FULL:
            return [FULL] * self.num_hidden_layers
        raise NotKnown(what)

    def _ropes(self) -> dict[str, Any]:
        given, ways = self._given, self._class.ropes
        parameters = given.get("rope_scaling") or given.get("rope_parameters") or {}
        if all(isinstance(one, dict) for one in parameters.values()) and parameters:
            types = given.get("layer_types") or ()
            is_kept = (
                BY_LAYER in ways and _LAYER_TYPES.issuperset(parameters) and not parameters.keys().isdisjoint(types)
            )
            if not is_kept or any(given.get(name) is not None for name in _OLD_ROPES):
                raise NotKnown("rope_parameters")
            for one in parameters.values():
                _check_complete(one, may_be_scaled=True)
            return parameters
        is_old = any(given.get(name) is not None for name in _OLD_ROPES)
        way = OLD if is_old else PARTIAL if "partial_rotary_factor" in parameters else FLAT
        if way not in ways:
            raise NotKnown("rope_parameters")
        if given.get("rope_theta") is not None:
            parameters = {"rope_theta": given["rope_theta"], **parameters}
            if parameters.keys() == {"rope_theta"}:
                parameters["rope_type"] = "default"
        _check_complete(parameters, may_be_scaled=SCALED in ways)
        return parameters


def _check_complete(parameters: dict[str, Any], *, may_be_scaled: bool) -> None:
    """``NotKnown`` unless transformers has nothing to add to the parameters of a rotary embedding."""
    kind = parameters.get("rope_type")
    if not isinstance(kind, str) or kind not in (_NEEDED if may_be_scaled else ("default",)):
        raise NotKnown("rope_parameters")
    if any(parameters.get(name) is None for name in ("rope_theta", *_NEEDED[kind])):
        raise NotKnown("rope_parameters")


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("list[int]", "list[str]"):
        return type(value) is list and all(_is_of(one, kind[5:-1]) for one in value)
    if kind == "dict":
        return type(value) is dict
    return type(value) is _KINDS.get(kind)


def known_class(name: str) -> KnownClass | None:
    """The class of this name; None where the table is not of the transformers that is installed."""
    return _table().get(name)


@functools.cache
def _table() -> dict[str, KnownClass]:
    table = json.loads(TABLE.read_text())
    if table["transformers"] != importlib.metadata.version("transformers"):
        return {}
    return {
        name: KnownClass(name, **_made(of_class, table["attributes"])) for name, of_class in table["classes"].items()
    }


def _made(of_class: dict[str, Any], attributes: list[str]) -> dict[str, Any]:
    """The arguments of ``KnownClass``. Sequences among the defaults are tuples in the classes."""
    parameters = {n: tuple(one) if isinstance(one, list) else one for n, one in of_class["parameters"].items()}
    return {**of_class, "parameters": parameters, "attributes": {*of_class["attributes"], *attributes}}
