"""Checkpoints that hold a family's tensors in another way: under other names, or all experts in one tensor."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from compiled_llm.checkpoint.stored_tensors import DTYPES, CheckpointError, StoredTensor, listed
from compiled_llm.models.family import Description
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.quantized.scheme import StoredPart


def in_family_layout(stored: dict[str, StoredTensor], description: Description[Any]) -> dict[str, StoredTensor]:
    """``stored`` with the family's tensors as ``description`` has them; all others stay as they are.

    Raises:
        CheckpointError: a tensor that holds the weights of all experts has another shape than they imply, or they are
            quantised.
    """
    d = description
    names = [*d.stored, *d.may_repeat, *d.may_repeat.values(), *d.unused, *d.other_names, *d.stacks]
    found = by_family_names(stored, list(dict.fromkeys(names)))
    for other, name in d.other_names.items():
        if other in found and name not in found:
            found[name] = found.pop(other)
    problems: list[str] = []
    for name, experts in d.stacks.items():
        first = experts[0][0]
        if name not in found or _weight(first) in found:
            continue
        if d.stored.get(_weight(first)) != StoredPart(((first.out_features, first.in_features),)):
            problems.append(
                f"{name} ({found[name].path.name}) holds the weights of all experts, which config.json's "
                "quantization_config says are quantised: those are read where each expert has tensors of its own"
            )
            continue
        outputs = sum(part.out_features for part in experts[0])
        if wrong := difference(found[name], StoredPart(((len(experts), outputs, first.in_features),))):
            problems.append(f"mismatched: {name} ({found[name].path.name}) is {wrong}")
            continue
        found |= _taken_apart(found.pop(name), experts)
    if problems:
        directory = next(iter(stored.values())).path.parent
        raise CheckpointError(f"{directory}: the checkpoint does not match its config.json; {listed(problems)}")
    return found


def difference(tensor: StoredTensor, wanted: StoredPart) -> str | None:
    """What ``tensor`` is, and what it should be; None where it is what it should be."""
    if not any(_fits(tensor.shape, shape) for shape in wanted.shapes):
        return f"{tensor.shape!s:.100}, config.json implies {' or '.join(map(str, wanted.shapes))}"
    kinds = [name for name, dtype in DTYPES.items() if dtype in wanted.dtypes]
    return None if tensor.dtype in kinds else f"{tensor.dtype}; allowed: {', '.join(kinds)}"


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(size in (-1, found) for found, size in zip(shape, wanted, strict=True))


def _taken_apart(stack: StoredTensor, experts: Sequence[Sequence[StoredLinear]]) -> dict[str, StoredTensor]:
    """Name -> place of each expert's parts, whose rows follow one another in the file."""
    found, offset = {}, stack.offset
    for parts in experts:
        for part in parts:
            one = stack._replace(shape=(part.out_features, part.in_features), offset=offset)
            found[_weight(part)] = one
            offset += one.nbytes
    return found


def _weight(part: StoredLinear) -> str:
    return f"{part.name}.weight"


# -- Names


T = TypeVar("T")

# Parts of models that hold a language model besides: what sees and hears, further heads, layers that guess tokens.
_OTHER_PARTS = {
    "audio_encoder", "audio_model", "audio_tower", "code2wav", "connector", "embed_audio", "embed_vision",
    "image_newline", "mm_projector", "mtp", "mtp_layers", "multi_modal_projector", "patch_merger", "talker",
    "token2wav", "v_head", "vision_embed_tokens", "vision_embedder", "vision_encoder", "vision_language_adapter",
    "vision_model", "vision_projection", "vision_tower", "visual",
}  # fmt: skip
# What only layers have that guess the token after the next. They follow the last layer in number.
_GUESSING = ("eh_proj", "enorm", "hnorm", "shared_head")
_LAYER = re.compile(r"(.*\blayers\.([0-9]{1,6}))\.(.+)")


def by_family_names(stored: Mapping[str, T], names: Collection[str]) -> dict[str, T]:
    """``stored`` with the tensors of a family under the family's names; all others stay as they are.

    Args:
        stored: by the names in the checkpoint.
        names: of the family, such as ``model.layers.0.mlp.up_proj.weight`` and ``lm_head.weight``.
    """
    root = _root(names)
    ways = _ways(root) if root else [lambda name: name]
    way = max(ways, key=lambda way: sum(way(name) in stored for name in names))  # of equals, the first
    renamed = dict(stored)
    for name in names:
        found = way(name)
        if name not in stored and found in stored:
            renamed[name] = renamed.pop(found)
    return renamed


def _root(names: Iterable[str]) -> str:
    """The first part of the names of a family's layers, such as ``model``."""
    roots = Counter(name.partition(".")[0] for name in names if re.search(r"\.\d+\.", name))
    return roots.most_common(1)[0][0] if roots else ""


def _ways(root: str) -> list[Callable[[str], str]]:
    """How names differ from a family's: ``root.X`` and, such as the head, ``Y``."""

    def within(prefix: str) -> Callable[[str], str]:
        """``root.X`` -> ``prefixX``; ``Y`` stays."""
        return lambda name: prefix + name.removeprefix(f"{root}.") if name.startswith(f"{root}.") else name

    return [
        lambda name: name,
        lambda name: f"language_model.{name}",  # a whole model in another
        within(f"{root}.language_model."),  # its body in another's, as transformers writes it since 4.52
        within(f"{root}.text_model."),
        within("model."),  # as transformers names the body of every family
        within(""),  # a body alone
        within("language_model."),  # a body alone in another's
    ]


def parts_of(names: Collection[str], num_layers: int) -> dict[str, str | None]:
    """Name -> of which part besides a language model of ``num_layers`` a tensor is; None: of none that is known."""
    layers = {name: found for name in names if (found := _LAYER.match(name)) and int(found[2]) >= num_layers}
    guessing = {found[1] for found in layers.values() if found[3].startswith(_GUESSING)}
    parts = {name: _other_part(name) for name in names}
    return parts | {name: found[1] for name, found in layers.items() if parts[name] is None and found[1] in guessing}


def _other_part(name: str) -> str | None:
    """The part that a tensor's name tells before the number of a layer."""
    for part in name.split("."):
        if part in _OTHER_PARTS or part.startswith("mtp_"):
            return part
        if part.isdigit():
            break
    return None
