"""LogitsTransform: a user's own change of logits, compiled into the step; how it is loaded and checked."""

import abc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.error_texts import shown


class Field(NamedTuple):
    """A tensor that a ``LogitsTransform`` gets, of which each request gives its row.

    Attributes:
        shape: of one request's row; the tensor is ``[R, *shape]``.
        default: in every place of the rows of requests that do not ask for the transform.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    default: float


class LogitsContext(NamedTuple):
    """What a ``LogitsTransform`` may look at."""

    position: Tensor  # [R] int32, of the token to be chosen
    token_counts: Tensor  # [R, V] float32: how often the output has each token, and a half more if the prompt has it


class LogitsTransform(abc.ABC):
    """A user's own change of logits, compiled into the step: ``CompiledEngine(logits_transforms=[MyTransform()])``.

    A request asks for it by name and gives its argument: ``SamplingParams(logits_transforms={"mine": 0.5})``. The row
    of a request that does not ask has the fields' defaults, and must come out as it went in; the engine tries that out
    when it starts. A transform is compiled with the engine's graphs, once, so ``__call__`` is plain PyTorch on tensors
    of fixed shape, without a look at their contents from Python.

    Attributes:
        name: by which requests ask for it.
        fields: the tensors it gets.
    """

    name: str
    fields: Mapping[str, Field]

    @abc.abstractmethod
    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        """The fields of a request: what goes into its row of each, numbers or nested lists of them.

        Raises:
            ValueError: the argument is not one for this transform; the request is refused with the message.
        """

    @abc.abstractmethod
    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        """New logits ``[R, V]`` float32 from logits of the same kind; -inf bans a token."""


def load_transforms(items: Sequence[Any], vocab_size: int, device: torch.device) -> tuple[LogitsTransform, ...]:
    """The engine argument ``logits_transforms`` as objects: each is one, or its class, or "module:name" of either.

    Raises:
        ValueError: one that could not be served: its name, its fields, or logits that it changes unasked.
    """
    transforms = tuple(_load(item) for item in items)
    names = [transform.name for transform in transforms]
    if len(set(names)) < len(names):
        raise ValueError(f"logits_transforms must have names of their own, given {names!r}")
    for transform in transforms:
        logits = torch.linspace(-9, 9, vocab_size, device=device).repeat(2, 1)
        fields = {key: torch.full((2, *f.shape), f.default, dtype=f.dtype) for key, f in transform.fields.items()}
        context = LogitsContext(torch.ones(2, dtype=torch.int32, device=device), torch.zeros_like(logits))
        result = transform(logits.clone(), {key: field.to(device) for key, field in fields.items()}, context)
        if result.shape != logits.shape or result.dtype != torch.float32 or not torch.equal(result, logits):
            raise ValueError(
                f"logits_transforms: {transform.name!r} must return float32 logits of the same shape, and leave the "
                "rows as they are whose fields have their defaults"
            )
    return transforms


def field_rows(transform: LogitsTransform, argument: Any, vocab_size: int) -> dict[str, Tensor]:
    """What a request that asks for ``transform`` has in its row of each field.

    Raises:
        ValueError: the transform refuses the argument, or makes of it what its fields do not hold.
    """
    try:
        values = dict(transform.row(argument, vocab_size))
        rows = {
            name: torch.as_tensor(values.pop(name, torch.full(field.shape, field.default)), dtype=field.dtype)
            for name, field in transform.fields.items()
        }
    except Exception as error:  # whatever a user's code raises, its request is refused and no other
        raise ValueError(f"logits_transforms: {transform.name!r} refuses {shown(argument)}: {error}") from error
    if values:
        raise ValueError(f"logits_transforms: {transform.name!r} has no fields {sorted(map(str, values))}")
    for name, field in transform.fields.items():
        if rows[name].shape != field.shape:
            raise ValueError(
                f"logits_transforms: {transform.name!r} must give its field {name!r} the shape {field.shape}, gave "
                f"{tuple(rows[name].shape)} for {shown(argument)}"
            )
    return rows


def _load(item: Any) -> LogitsTransform:
    if isinstance(item, str):
        module, _, name = item.partition(":")
        try:
            item = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"logits_transforms: {item!r} must be 'module:name' of one: {error}") from error
    found = item() if isinstance(item, type) else item
    if not isinstance(found, LogitsTransform):
        raise ValueError(f"logits_transforms must hold LogitsTransform objects or 'module:name', given {found!r}")
    if not isinstance(getattr(found, "name", None), str) or not found.name:
        raise ValueError(f"logits_transforms: {type(found).__name__} must have a name")
    fields = getattr(found, "fields", None)
    if not isinstance(fields, Mapping) or not all(_is_servable(field) for field in fields.values()):
        raise ValueError(
            f"logits_transforms: {found.name!r} must have fields, a dict of Field by name, each of a dtype that numpy "
            f"has, given {fields!r}"
        )
    return found


def _is_servable(field: Any) -> bool:
    try:
        return isinstance(field, Field) and torch.empty(0, dtype=field.dtype).numpy() is not None
    except TypeError:  # a dtype that numpy has not
        return False
