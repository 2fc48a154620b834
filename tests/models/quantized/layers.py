"""What the tests of published layouts share: a scheme's decoded rows against the matrix that they stand for."""

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.ops.linear.quantized_weight import (
    DTYPE_NAMES,
    dequantize,
    empty_quantized,
    pack_quantized_rows,
    unpack_quantized_rows,
)


def decoded(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int], step: int = 24) -> Tensor:
    """The matrix ``[N, K]`` float32, decoded in pieces of ``step`` rows, its columns as the model's inputs lie.

    The tensors must be those that the scheme names, in shape and dtype. What is kept of them is what was decoded, and
    scales take the bytes that they have in the file.
    """
    stored = scheme.stored(*shape)
    assert tensors.keys() <= stored.keys()
    for name, part in stored.items():
        assert name in tensors or not part.required, name
        if name in tensors:
            assert tuple(tensors[name].shape) in part.shapes, (name, tensors[name].shape, part.shapes)
            assert tensors[name].dtype in part.dtypes, (name, tensors[name].dtype)
    used = {name: tensor for name, tensor in tensors.items() if stored[name].used}
    form = scheme.kept({name: tensor.dtype for name, tensor in tensors.items()}, torch.float32)
    scales = [tensor.dtype for name, tensor in tensors.items() if "scale" in name and "input" not in name]
    assert scheme.form.element == "fp4" or form.scale_dtype == DTYPE_NAMES[scales[0]]
    weight = empty_quantized(form, *shape, torch.device("cpu"))
    found = []
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        given = dict(used)
        if scheme.in_pieces is not None:
            given[scheme.in_pieces] = given[scheme.in_pieces][first : first + count]
        rows = scheme.decode(given, first, count)
        assert rows.codes.shape == (count, shape[1])
        assert rows.codes.dtype == torch.int8
        assert rows.scales.shape == (count, scheme.form.num_groups(shape[1]))
        assert (rows.zeros is not None) == scheme.form.zeros
        pack_quantized_rows(weight, first, rows, form)
        kept = unpack_quantized_rows(weight, torch.arange(first, first + count), form, shape[1])
        for of_kept, of_rows in zip(kept, rows, strict=True):
            assert (of_kept is None and of_rows is None) or torch.equal(of_kept, of_rows)
        found.append(dequantize(rows, scheme.form))
    matrix = torch.cat(found)
    order = scheme.order(used)
    if order is None:
        return matrix
    back = torch.empty_like(matrix)
    back[:, order.long()] = matrix
    return back
