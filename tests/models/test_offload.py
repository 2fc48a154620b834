"""Which layers lie in host memory, which tensors of them, and when these begin to come and are awaited."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.checkpoint.loader import dummy_weights
from compiled_llm.models.layers.residual import FetchingNorm
from compiled_llm.models.linears.adapted import Adaptable
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.offload import (
    Offloading,
    PinnedMemory,
    bytes_of_layer,
    chosen_layers,
    spread,
    with_fetches,
    with_weights,
)
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import bytes_to_read, tensors
from tests.drawn import marked
from tests.families import EVERY_CONFIG
from tests.models.ranks import config_of

CPU = torch.device("cpu")
OFFLOADED = [name for name in EVERY_CONFIG if name not in ("olmo2", "olmo3")]  # these two have no norm to begin with


def weights_of(family: str, num_layers: int, linears: Any = Dense) -> Any:
    return dummy_weights(config_of(family, ("num_hidden_layers", num_layers)), torch.float32, CPU, 0, linears)


def test_layers_are_spread_evenly_and_the_last_is_one_of_them() -> None:
    assert spread(3, 6) == (1, 3, 5)
    assert spread(4, 4) == (0, 1, 2, 3)
    assert spread(3, 28) == (8, 17, 27)
    for count in range(1, 81):
        found = spread(count, 80)
        assert len(set(found)) == count
        assert found[-1] == 79
        apart = {end - first for first, end in zip((-1, *found), found, strict=False)}
        assert max(apart) - min(apart) <= 1


def test_as_many_layers_as_it_takes_and_three_at_least() -> None:
    weights = weights_of("llama", 6)
    gib = bytes_of_layer(weights.layers[0]) / 2**30
    assert chosen_layers(weights, gib / 100, "X") == chosen_layers(weights, 3 * gib, "X") == (1, 3, 5)
    assert len(chosen_layers(weights, 3.01 * gib, "X")) == 4
    assert chosen_layers(weights, 6 * gib, "X") == tuple(range(6))
    with pytest.raises(ValueError, match=r"cpu_offload_gb must be at most .* for X .*all its 6 layers.*given"):
        chosen_layers(weights, 6.01 * gib, "X")
    with pytest.raises(ValueError, match="cpu_offload_gb must be at most 0 for X"):
        chosen_layers(weights_of("llama", 2), gib, "X")
    with pytest.raises(ValueError, match="cpu_offload_gb must be 0 for X, whose layers do not begin with a norm"):
        chosen_layers(weights_of("olmo2", 3), gib / 100, "X")


def test_matrices_of_linear_layers_alone_are_moved() -> None:
    """Norms and biases stay; so do adapters' slots, which are written to, and what routers count."""
    kind = Adaptable(Quantizing(Dense, torch.float32, SCHEMES["int8"], None, None, ()), 2, 4, ("all-linear", "experts"))
    (layer, *_) = weights_of("qwen3-moe", 3, kind).layers
    moved: list[Tensor] = []
    same = with_weights(layer, lambda tensor: moved.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert [type(part) for part in same] == [type(part) for part in layer]
    assert all(one is other for one, other in zip(tensors(same), tensors(layer), strict=True))
    slots = {id(tensor) for tensor in tensors((layer.attention.qkv.changes, layer.mlp.gate_up.changes))}
    assert len(slots) > 4
    assert not slots & {id(tensor) for tensor in moved}
    assert all(tensor.dim() > 1 for tensor in moved)
    w = layer.attention.qkv.plain.weight, layer.mlp.gate_up.plain.weight, layer.mlp.router.weight
    assert {id(tensor) for tensor in tensors(w) if tensor.dim() > 1} < {id(tensor) for tensor in moved}
    assert sum(tensor.nbytes for tensor in moved) == bytes_of_layer(layer)


def events_of(layers: tuple[Any, ...]) -> list[tuple[str, int, int]]:
    """What happens to each buffer in a step: ("fetch" or "await" or "read", layer, buffer's address)."""
    found: list[tuple[str, int, int]] = []
    for number, layer in enumerate(layers):
        if isinstance(norm := layer.input_norm, FetchingNorm):
            found += [("fetch", number, buffer.data_ptr()) for _, buffer in norm.begun]
            found += [("await", number, buffer.data_ptr()) for buffer in norm.awaited]
        read: list[Tensor] = []
        with_weights(layer, lambda tensor, read=read: read.append(tensor) or tensor)  # type: ignore[misc]
        found += [("read", number, tensor.data_ptr()) for tensor in read]
    return found


@pytest.mark.parametrize("count", [3, 4, 5, 7, 12])
def test_a_buffer_is_begun_awaited_and_read_in_turn(count: int) -> None:
    weights, chosen = weights_of("llama", 12), spread(count, 12)
    plain = [tensors(layer) for layer in weights.layers]
    made, sizes = with_fetches(weights, chosen, CPU)
    assert sizes.host == count * bytes_of_layer(weights.layers[0])
    assert sizes.buffers == 2 * bytes_of_layer(weights.layers[0])
    hosts = {id(host): host for layer in made.layers for host, _ in getattr(layer.input_norm, "begun", ())}
    assert hosts.keys() == {id(t) for n in chosen for t in plain[n] if t.dim() > 1}, "each once a step"
    buffers = {b.data_ptr() for layer in made.layers for b in getattr(layer.input_norm, "awaited", ())}
    state = dict.fromkeys(buffers, "read")
    after = {"read": ("read", "fetch"), "fetch": ("await",), "await": ("read",)}
    for what, number, address in events_of(made.layers):
        if address in buffers:
            assert what in after[state[address]], (what, number)
            state[address] = what
    assert set(state.values()) == {"read"}, "nothing is left to come"
    # A copy has the whole of the layers between to come in: it begins when the layer that had its buffer is computed.
    begun = [n for n, layer in enumerate(made.layers) if getattr(layer.input_norm, "begun", ())]
    assert begun == sorted({0, *(number + 1 for number in chosen[:-2])})


def test_layers_of_other_shapes_have_buffers_of_their_own() -> None:
    weights = weights_of("glm4-moe", 6)  # the first has no experts
    made, sizes = with_fetches(weights, tuple(range(6)), CPU)
    for number, layer in enumerate(made.layers):
        hosts, own = tensors(weights.layers[number]), tensors(layer._replace(input_norm=layer.input_norm.norm))
        assert [(t.shape, t.dtype, t.stride()) for t in own] == [(t.shape, t.dtype, t.stride()) for t in hosts]
    assert sizes.buffers < 2 * sizes.host / 3
    experts = [layer.mlp.gate_up.weight.data_ptr() for layer in made.layers[1:]]
    assert experts[0] == experts[2] == experts[4] != experts[1] == experts[3]


def test_what_a_step_reads_of_the_device_counts_once() -> None:
    weights = weights_of("llama", 4)
    made, _ = with_fetches(weights, (0, 1, 2, 3), CPU)
    assert bytes_to_read(made.layers) == bytes_to_read(weights.layers)


@pytest.mark.parametrize("family", marked(OFFLOADED, ["qwen3-moe", "deepseek-v3", "nemotron-h-moe"]))
def test_chosen_layers_are_put_into_host_memory_as_they_are_taken(family: str) -> None:
    """All that comes to buffers, and nothing else; of layers that have another number in their names, too."""
    config = config_of(family)
    chosen = tuple({1, len(family_of(config).describe(config).weights.layers) - 1})
    put: list[Tensor] = []
    memory = PinnedMemory([2**20], pinned=False)

    def noted(tensor: Tensor) -> Tensor:
        put.append(memory.put(tensor))
        return put[-1]

    plain = dummy_weights(config, torch.float32, CPU, 0, Dense)
    weights = dummy_weights(config, torch.float32, CPU, 0, Offloading.of(Dense, config, chosen, noted))
    for one, other in zip(tensors(weights), tensors(plain), strict=True):
        assert torch.equal(one, other)
    moved: list[Tensor] = []
    for number in chosen:
        with_weights(weights.layers[number], lambda tensor: moved.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert {id(tensor) for tensor in moved} == {id(tensor) for tensor in put}
    described = family_of(config).describe(config, torch.float32, Offloading.of(Dense, config, chosen, noted))
    assert all(tensor.is_meta for tensor in tensors(described.weights))
    assert len(put) == len(moved)


def test_tensors_lie_side_by_side_in_large_pieces() -> None:
    given = [torch.randn(10, 30).t(), torch.randn(700), torch.arange(9000, dtype=torch.int8), torch.randn(2, 3, 4)]
    memory = PinnedMemory([tensor.nbytes for tensor in given], 8192, pinned=False)
    kept = [memory.put(tensor) for tensor in given]
    for one, other in zip(kept, given, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.data_ptr() % 4 == one.storage_offset() * one.itemsize % 512 == 0
    assert memory.nbytes == memory.foreseen_nbytes == 8192 + 16384, "as torch rounds them up"
    assert [tensor.untyped_storage().data_ptr() == kept[0].untyped_storage().data_ptr() for tensor in kept] == [
        True, True, False, True,
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="a weight with gaps"):
        memory.put(torch.zeros(4, 6)[:, :3])
    memory.close()
    assert memory.nbytes == 0
    assert torch.equal(kept[0], given[0]), "as long as somebody has it"


def test_the_last_pieces_are_no_larger_than_what_is_to_come() -> None:
    memory = PinnedMemory([5000] * 4, 8192, pinned=False)
    for _ in range(4):
        memory.put(torch.zeros(5000, dtype=torch.int8))
    assert memory.nbytes == memory.foreseen_nbytes == 4 * 8192
    assert PinnedMemory([1000] * 3).foreseen_nbytes == 4096, "and not 2 GiB"
    assert PinnedMemory([2**31 + 1, 2**30]).foreseen_nbytes == 2**32, "room that torch would waste"
