"""What a family takes its weights from, and what is known of them without reading any."""

import dataclasses

import pytest
import torch

from compiled_llm.checkpoint.loader import RandomReader, load_weights
from compiled_llm.checkpoint.stored_layout import in_family_layout
from compiled_llm.checkpoint.stored_tensors import locate
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind, StoredLinear
from compiled_llm.models.quantized.scheme import StoredPart
from compiled_llm.models.reader import Wanted
from compiled_llm.models.registry import family
from compiled_llm.models.weights import Source, bytes_to_read, linears, tensors
from tests.families import checkpoint
from tests.models.test_forward import in_turns

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "kind"), in_turns(Packed, Dense))
def test_a_description_has_the_shapes_of_what_is_loaded(name: str, kind: LinearKind) -> None:
    config = read_config(checkpoint(name))
    description = family(config.architecture).describe(config, torch.bfloat16, kind)
    described = description.weights
    loaded = load_weights(checkpoint(name), config, torch.bfloat16, CPU, kind)
    stored = in_family_layout(locate(checkpoint(name)), description)
    assert {name: StoredPart((tensor.shape,)) for name, tensor in stored.items()} == description.stored
    assert [t.shape for t in tensors(described)] == [t.shape for t in tensors(loaded)]
    assert all(t.is_meta for t in tensors(described))
    assert sum(t.nbytes for t in tensors(described)) == sum(t.nbytes for t in tensors(loaded))
    assert (described.embedding is described.head) == (loaded.embedding is loaded.head)


def test_a_tensor_is_taken_once() -> None:
    llama = family("LlamaForCausalLM")
    twice = dataclasses.replace(llama, take=lambda config, source: [llama.take(config, source) for _ in range(2)])
    with pytest.raises(AssertionError, match=r"model\.embed_tokens\.weight is taken twice"):
        twice.describe(read_config(checkpoint("llama")))


def test_what_a_step_reads() -> None:
    class Means(RandomReader):
        def tensor(self, wanted: Wanted) -> torch.Tensor:
            return torch.full(wanted.shape, wanted.mean, dtype=self.dtype)

    source = Source(Means(torch.bfloat16, CPU, seed=0), Packed)
    layer = source.linear(StoredLinear("a", 17, 8, bias=True), StoredLinear("b", 2, 8, bias=True))
    norms = source.norm("c", 8), source.norm_plus_one("d", 8)
    assert torch.equal(norms[0].float(), norms[1])
    assert linears((layer, (norms, None))) == [layer]
    assert bytes_to_read((layer, (norms, None))) == 2 * (19 * 8 + 19) + 2 * 8 + 4 * 8
