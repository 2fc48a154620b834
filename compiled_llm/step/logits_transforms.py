"""LogitsTransform: a user's own function of logits, compiled into the step; how it is loaded and checked."""

import abc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api.readable import shown
from compiled_llm.ops.torch_settings import own_settings


class Field(NamedTuple):
    """A tensor that a ``LogitsTransform`` takes, with a row from each request.

    Attributes:
        shape: of one request's row; the tensor is ``[R, *shape]``.
        dtype: of the tensor; numpy must have it.
        default: every element of the rows of requests that do not use the transform.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    default: float


class LogitsContext(NamedTuple):
    """What a ``LogitsTransform`` may read. R rows of logits, V tokens in the vocabulary."""

    position: Tensor  # [R] int32, of the token to be chosen
    token_counts: Tensor  # [R, V] float32: occurrences of each token in the output, plus 0.5 if the prompt has it


class LogitsTransform(abc.ABC):
    """A user's own function of logits, compiled into the step: ``CompiledEngine(logits_transforms=[MyTransform()])``.

    A request uses it by name, with an argument: ``SamplingParams(logits_transforms={"mine": 0.5})``. The row of a
    request that does not use it has the fields' defaults, and must come out unchanged; the engine tests that when it
    starts. A transform is compiled with the engine's graphs, once, so ``__call__`` is plain PyTorch on tensors of fixed
    shape, and Python must not read their contents.

    Attributes:
        name: by which requests use it.
        fields: the tensors it takes, by name.
    """

    name: str
    fields: Mapping[str, Field]

    @abc.abstractmethod
    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        """A request's row in each field, by name: numbers or nested lists of them. A missing one has the default.

        Raises:
            ValueError: the argument is not valid for this transform; the request is refused with the message.
        """

    @abc.abstractmethod
    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        """Logits ``[R, V]`` float32 -> changed ones of that shape and dtype; -inf bans a token.

        ``fields``: ``[R, *shape]`` each.
        """


def load_transforms(items: Sequence[Any], vocab_size: int, device: torch.device) -> tuple[LogitsTransform, ...]:
    """The objects of the engine argument ``logits_transforms``: each item is one, a class, or "module:name" of either.

    Raises:
        ValueError: the name or the fields of one are wrong, or it changes logits of requests that do not use it.
    """
    transforms = tuple(_load(item) for item in items)
    names = [transform.name for transform in transforms]
    if len(set(names)) < len(names):
        raise ValueError(f"logits_transforms must have different names, given {names!r}")
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
    """For each field of ``transform``, the row ``[*shape]`` of a request that uses it with ``argument``.

    Raises:
        ValueError: the transform refuses the argument, or its rows do not fit its fields.
    """
    try:
        with own_settings():
            values = dict(transform.row(argument, vocab_size))
            rows = {
                name: torch.as_tensor(values.pop(name, torch.full(field.shape, field.default)), dtype=field.dtype)
                for name, field in transform.fields.items()
            }
    except Exception as error:  # whatever a user's code raises, this request alone is refused
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
    except TypeError:  # numpy lacks the dtype
        return False
