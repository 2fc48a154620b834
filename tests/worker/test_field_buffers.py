"""FieldBuffers: what the host writes is what the graph reads, at addresses that stay."""

import pytest
import torch

from compiled_llm.compiling.argument_specs import spec_of
from compiled_llm.worker.field_buffers import FieldBuffers

FIELDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "flag": ((1,), torch.bool),
    "ids": ((3,), torch.int64),
    "matrix": ((2, 5), torch.float32),
    "empty": ((0,), torch.int32),
    "number": ((), torch.float32),
    "words": ((7, 3), torch.int32),
    "half": ((9,), torch.float16),
}
CPU = torch.device("cpu")


def fill(buffers: FieldBuffers, value: int) -> None:
    arrays = buffers.next_arrays()
    for array in arrays.values():
        array[...] = value
    buffers.copy()


def test_tensors_have_their_shapes_and_dtypes_and_begin_as_zeros() -> None:
    buffers = FieldBuffers(FIELDS, CPU)
    assert {name: (tuple(t.shape), t.dtype) for name, t in buffers.tensors.items()} == FIELDS
    assert not any(tensor.any() for tensor in buffers.tensors.values())
    for arrays in buffers.all_arrays():
        assert {name: array.shape for name, array in arrays.items()} == {name: f[0] for name, f in FIELDS.items()}


def test_fields_are_aligned_and_do_not_overlap() -> None:
    buffers = FieldBuffers(FIELDS, CPU)
    ends = 0
    for tensor in sorted(buffers.tensors.values(), key=lambda tensor: tensor.storage_offset() * tensor.itemsize):
        begins = tensor.storage_offset() * tensor.itemsize
        assert begins % 64 == 0
        assert begins >= ends
        ends = begins + tensor.nbytes
        assert tensor.is_contiguous()
    assert ends <= buffers.nbytes == buffers.tensors["ids"].untyped_storage().nbytes()
    assert len({tensor.untyped_storage().data_ptr() for tensor in buffers.tensors.values()}) == 1


def test_what_is_filled_is_there_at_the_same_addresses() -> None:
    buffers = FieldBuffers(FIELDS, CPU)
    before = {name: (id(tensor), tensor.data_ptr()) for name, tensor in buffers.tensors.items()}
    for value in (1, 0, 1):
        fill(buffers, value)
        for tensor in buffers.tensors.values():
            assert torch.equal(tensor, torch.full_like(tensor, value))
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in buffers.tensors.items()} == before


def test_one_field_is_written_without_its_neighbours() -> None:
    for name in FIELDS:
        buffers = FieldBuffers(FIELDS, CPU)
        buffers.next_arrays()[name][...] = 1
        buffers.copy()
        assert [key for key, tensor in buffers.tensors.items() if tensor.any()] == ([name] if name != "empty" else [])


def test_tensors_are_marked_as_static_for_the_compiler() -> None:
    for tensor in FieldBuffers(FIELDS, CPU).tensors.values():
        assert spec_of(tensor).static_address is not None


@pytest.mark.gpu
def test_on_a_gpu_two_host_arrays_take_turns() -> None:
    buffers = FieldBuffers(FIELDS, torch.device("cuda"))
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    first, second = buffers.next_arrays(), buffers.next_arrays()
    assert first is not second
    assert buffers.next_arrays() is first
    assert len(buffers.all_arrays()) == 2
    for value in (1, 0, 1):
        fill(buffers, value)
        for tensor in buffers.tensors.values():
            assert torch.equal(tensor.cpu(), torch.full_like(tensor, value, device="cpu"))
    assert {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()} == addresses
