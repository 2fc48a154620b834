"""The sampling parameters that compiled graphs read: one line for each, in ``SAMPLING`` or in ``LOGITS``.

To add one: a field of ``SamplingParams``, which checks it; a line here; and a tensor of the same name in
``SamplingInput`` or ``LogitsInput``, which the graph reads. Buffers, requests' rows and padding are made from the line.
Which tokens stay, as by top-k, is decided in the op ``sample_tokens``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from compiled_llm.api.sampling_params import MAX_BIASES, SamplingParams
from compiled_llm.step.logits_transforms import LogitsTransform, field_rows

Name = str | tuple[str, str]  # of a parameter, or of a transform and one of its fields


class Parameter(NamedTuple):
    """A tensor with a row for each row of logits.

    Attributes:
        padding: the value in rows that belong to no request.
        value: (parameters, seed, vocabulary size) of a request -> its row. Its result for ``SamplingParams()`` is the
            neutral value.
        shape: of one row; the tensor is ``[R, *shape]``.
    """

    name: Name
    dtype: torch.dtype
    padding: float
    value: Callable[[SamplingParams, int, int], Any]
    shape: tuple[int, ...] = ()


def _top_k(params: SamplingParams, seed: int, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _bias_ids(params: SamplingParams, seed: int, vocab_size: int) -> list[int]:
    return _repeated(list(params.logit_bias or {0: 0.0}))


def _biases(params: SamplingParams, seed: int, vocab_size: int) -> list[float]:
    return _repeated(list((params.logit_bias or {0: 0.0}).values()))


def _repeated(values: list) -> list:
    """Filled up to ``MAX_BIASES`` with the first, which changes nothing: an id that occurs twice has the same bias."""
    return values + values[:1] * (MAX_BIASES - len(values))


# Read by ``sampling.sample``: the fields of ``SamplingInput``, without ``position``.
SAMPLING = (
    Parameter("temperature", torch.float32, 0.0, lambda params, seed, vocab_size: params.temperature),
    Parameter("top_p", torch.float32, 1.0, lambda params, seed, vocab_size: params.top_p),
    Parameter("top_k", torch.int32, 1, _top_k),
    Parameter("min_p", torch.float32, 0.0, lambda params, seed, vocab_size: params.min_p),
    Parameter("top_n_sigma", torch.float32, 0.0, lambda params, seed, vocab_size: params.top_n_sigma),
    Parameter("seed", torch.int64, 0, lambda params, seed, vocab_size: seed),
)
# Read by ``logits.process_logits``: fields of ``LogitsInput``.
LOGITS = (
    Parameter("presence_penalty", torch.float32, 0.0, lambda params, seed, vocab_size: params.presence_penalty),
    Parameter("frequency_penalty", torch.float32, 0.0, lambda params, seed, vocab_size: params.frequency_penalty),
    Parameter("repetition_penalty", torch.float32, 1.0, lambda params, seed, vocab_size: params.repetition_penalty),
    Parameter("bias_ids", torch.int64, 0, _bias_ids, (MAX_BIASES,)),
    Parameter("biases", torch.float32, 0.0, _biases, (MAX_BIASES,)),
)


def logits_parameters(transforms: Sequence[LogitsTransform]) -> tuple[Parameter, ...]:
    """``LOGITS``, and the fields of the users' ``transforms``, named (transform, field)."""
    return *LOGITS, *(_field_parameter(transform, name) for transform in transforms for name in transform.fields)


def _field_parameter(transform: LogitsTransform, name: str) -> Parameter:
    field = transform.fields[name]

    def value(params: SamplingParams, seed: int, vocab_size: int) -> Any:
        arguments = params.logits_transforms or {}
        if transform.name not in arguments:
            return field.default
        return field_rows(transform, arguments[transform.name], vocab_size)[name].numpy()

    return Parameter((transform.name, name), field.dtype, field.default, value, field.shape)
