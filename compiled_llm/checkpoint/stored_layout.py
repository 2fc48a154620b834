"""Checkpoints that hold a family's tensors in another way: under other names, or those of all experts in one."""

from collections.abc import Sequence
from typing import Any

from compiled_llm.checkpoint.stored_tensors import DTYPES, CheckpointError, StoredTensor, listed
from compiled_llm.checkpoint.tensor_names import by_family_names
from compiled_llm.models.family import Description
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.quantized.scheme import StoredPart


def in_family_layout(stored: dict[str, StoredTensor], description: Description[Any]) -> dict[str, StoredTensor]:
    """``stored`` with the family's tensors as ``description`` has them, the others as they are.

    Raises:
        CheckpointError: a tensor that holds the weights of all experts has another shape than these, or they are
            quantised.
    """
    d = description
    found = by_family_names(stored, [*d.stored, *d.may_repeat, *d.unused, *d.other_names, *d.stacks])
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
    """What ``tensor`` is, and what it should be; None where the two are the same."""
    if tensor.shape not in wanted.shapes:
        return f"{tensor.shape!s:.100}, config.json implies {' or '.join(map(str, wanted.shapes))}"
    kinds = [name for name, dtype in DTYPES.items() if dtype in wanted.dtypes]
    return None if tensor.dtype in kinds else f"{tensor.dtype}; allowed: {', '.join(kinds)}"


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
