"""Ranks that share a model against the model in one piece: threads of one process, through the KV cache."""

import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.model_files import checkpoint_directory, model_config
from compiled_llm.checkpoint.quantization import linears_of, published
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.inputs import StepInput
from compiled_llm.models.linears.adapted import Adaptable, Change
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.published import Published
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.linears.sharded import Sharding
from compiled_llm.models.linears.vocabulary import Ranks, VocabularyRows
from compiled_llm.models.registry import family_of
from compiled_llm.models.sharding import Section, Shard, of_elements, rank_config
from compiled_llm.models.weights import linear_layers
from compiled_llm.ops.linear.lora import tiles_of
from compiled_llm.ops.parallel.rank_group import RankGroup
from compiled_llm.ops.sampling.reference import greedy_tokens_reference
from tests.checkpoint.gguf.writing import MODELS, metadata_of, tensors_of, write
from tests.drawn import marked
from tests.e2e.test_gguf import kind_of
from tests.families import checkpoint
from tests.models.ranks import CPU, SHARED, config_of, logits_of_ranks, of_ranks, random_weights, rank_logits
from tests.models.steps import step_input
from tests.models.test_quantized_published import CASES, FLOATS

FLOAT, HALF = torch.float32, torch.bfloat16
RANK = 3  # of adapters
# A family of each kind: biases and packed tensors, norms over all heads, latents, experts in one tensor, states.
SAMPLE = [
    "llama-biases 2", "phi3 2", "olmo2 4", "deepseek-v3 2", "gpt-oss 2", "granite-hybrid 4", "lfm2 2", "qwen3.5 2",
]  # fmt: skip
EXPERTS = {  # whose experts four ranks can have as wholes
    "mixtral": ("num_local_experts", 8),
    "gpt-oss": ("num_local_experts", 8),
    "glm4-moe": ("n_routed_experts", 12),
    "qwen3-next": ("num_experts", 8),
    "granite-hybrid-moe": ("num_local_experts", 8),
    "nemotron-h-moe": ("n_routed_experts", 12),
    "gemma4-moe": ("num_experts", 8),
}
_WIDE = (("hidden_size", 256), ("intermediate_size", 1024), ("head_dim", 128))  # groups of 128 inputs in each eighth


def steps_of(config: ModelConfig) -> list[StepInput]:
    """A prefill of two requests with padding, a decode beside a chunk, and decodes."""
    torch.manual_seed(0)
    first, second = torch.randint(0, config.vocab_size, (2, 12)).tolist()
    tables = [[1, 2, 3], [4, 5, 6]]
    return [
        step_input([(first[:9], 0), (second[:5], 0)], tables, padding=2),
        step_input([(first[9:10], 9), (second[5:11], 5)], tables),
        step_input([(first[10:11], 10), (second[11:], 11)], tables),
    ]


def real(logits: Tensor) -> Tensor:
    """Without those of padding, the last two of the first step."""
    return torch.cat([logits[:14], logits[16:]])


def test_every_weight_of_every_family_is_cut_or_said_to_be_replicated() -> None:
    for name in SHARED:
        config = config_of(name)
        whole, shared = (
            family_of(config).describe(config, linears=kind)
            for kind in (Dense, Sharding(Dense, Shard(1, 2), RankGroup.alone()))
        )
        assert shared.taken == whole.taken, f"{name}: names and shapes are the checkpoint's"
        assert shared.stored == whole.stored, name


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3", "starcoder2", "nemotron-h"])
def test_ranks_have_the_weights_of_the_model_between_them(name: str) -> None:
    config = config_of(name, ("vocab_size", 308))

    def nbytes(kind: LinearKind) -> int:
        layers = linear_layers(family_of(config).describe(config, linears=kind).weights)
        return sum(layer.nbytes for layer in layers)

    whole = nbytes(Dense)
    shares = [nbytes(Sharding(Dense, Shard(rank, 2), RankGroup.alone())) for rank in range(2)]
    assert max(shares) == min(shares)
    assert whole <= sum(shares) < 1.02 * whole  # routers and the biases of sums twice


@pytest.mark.parametrize("case", marked([f"{name} {size}" for name in SHARED for size in (2, 4)], SAMPLE))
def test_logits_are_those_of_one_rank(case: str) -> None:
    name, size = case.split()[0], int(case.split()[1])
    config = config_of(name)
    steps = steps_of(config)
    whole = real(rank_logits(config, random_weights(config, Dense), Shard(0, 1), steps))
    assert whole.std() > 0.3
    for logits in logits_of_ranks(config, size, Packed if size == 4 else Dense, steps):
        torch.testing.assert_close(real(logits), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [pytest.param(FLOAT, marks=pytest.mark.battery), HALF])
@pytest.mark.parametrize("name", marked([name for name in SHARED if name != "lfm2"], ["llama", "glm4-moe"]))
def test_exact_sums_have_the_same_bits_for_any_number_of_ranks(name: str, dtype: torch.dtype) -> None:
    config = config_of(name)
    check_exact(config, Packed, dtype)


@pytest.mark.parametrize("scheme", marked(SCHEMES, []))
def test_exact_sums_of_quantised_layers(scheme: str) -> None:
    own = SCHEMES[scheme]
    check_exact(config_of("llama", *_WIDE), Quantizing(Packed, HALF, own, own, own), HALF)


@pytest.mark.parametrize("scheme", marked(["int8", "fp8", "int4"], ["int8"]))
def test_quantised_layers_have_the_codes_of_one_rank(scheme: str) -> None:
    own = SCHEMES[scheme]
    config = config_of("llama", *_WIDE)
    kind, steps = Quantizing(Packed, FLOAT, own, own, own), steps_of(config)
    whole = real(rank_logits(config, random_weights(config, kind), Shard(0, 1), steps))
    for logits in logits_of_ranks(config, 4, kind, steps):
        torch.testing.assert_close(real(logits), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", marked(["llama", "olmo2", "mixtral", "deepseek-v3", "qwen3.5"], ["llama"]))
def test_exact_sums_of_eight_ranks(name: str) -> None:
    check_exact(config_of(name), Packed, HALF, (8,))


def check_exact(
    config: ModelConfig, kind: LinearKind, dtype: torch.dtype, sizes: tuple[int, ...] = (2, 4), **how: Any
) -> None:
    steps = steps_of(config)
    (one,) = logits_of_ranks(config, 1, kind, steps, dtype, exact=True, **how)
    near = rank_logits(config, random_weights(config, kind, dtype), Shard(0, 1), steps, dtype)
    assert real(one - near).abs().median() < (1e-5 if dtype == FLOAT else 0.05) * near.std()
    for size in sizes:
        for logits in logits_of_ranks(config, size, kind, steps, dtype, exact=True, **how):
            assert torch.equal(real(logits), real(one)), f"{size} ranks"


@pytest.mark.parametrize("name", marked(EXPERTS, ["mixtral"]))
def test_whole_experts(name: str) -> None:
    config = config_of(name, EXPERTS[name])
    steps = steps_of(config)
    whole = real(rank_logits(config, random_weights(config, Dense), Shard(0, 1), steps))
    for kind in (Dense, Packed):
        for logits in logits_of_ranks(config, 4, kind, steps, whole_experts=True):
            torch.testing.assert_close(real(logits), whole, atol=1e-4, rtol=1e-4)
    check_exact(config, Packed, HALF, whole_experts=True)


@pytest.mark.parametrize("name", marked([*CASES, *FLOATS], []))
def test_layers_of_quantised_checkpoints(name: str) -> None:
    config = config_of("llama", *_WIDE)
    fields = {**CASES, **FLOATS}[name].fields
    config = dataclasses.replace(config, published=json.dumps(fields.get("quantization_config", fields)))
    kind, steps = published(config, Packed), steps_of(config)
    assert isinstance(kind, Published)
    whole = real(rank_logits(config, random_weights(config, kind), Shard(0, 1), steps))
    for logits in logits_of_ranks(config, 2, kind, steps):
        if "int8 by row" in name:  # a row is rounded by the largest of its values, and each rank has some of them
            assert (real(logits) - whole).std() < 0.1 * whole.std()
        else:
            torch.testing.assert_close(real(logits), whole, atol=1e-4, rtol=1e-4)
    check_exact(config, kind, HALF)


@pytest.mark.parametrize(
    "name",
    marked(
        ["llama-biases", "starcoder2", "gpt-neox-in-turn", "qwen2", "mixtral", "gpt-oss", "glm4-moe", "granite-hybrid"],
        ["gpt-neox-in-turn"],
    ),
)
def test_ranks_of_a_checkpoint(name: str) -> None:
    config = read_config(checkpoint(name))
    steps = steps_of(config)

    def take(config: ModelConfig, kind: LinearKind, dtype: torch.dtype) -> Any:
        return loader.load_weights(checkpoint(name), config, dtype, CPU, kind)

    whole = real(rank_logits(config, take(config, Dense, FLOAT), Shard(0, 1), steps))
    for logits in logits_of_ranks(config, 2, Packed, steps, take=take):
        torch.testing.assert_close(real(logits), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.battery
@pytest.mark.filterwarnings("ignore:max_model_len=256 is longer than original_max_position_embeddings")
@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_a_gguf_file(name: str, tmp_path: Path) -> None:
    """Files of blocks of all kinds, and of values where a name does not say blocks."""
    kinds = {"kind_of": kind_of} if name.endswith("blocks") else {}
    file = write(tmp_path / "model.gguf", MODELS[name][0], metadata_of(name), tensors_of(name), **kinds)
    asked = EngineConfig(model=str(file), dtype="float32")
    directory = checkpoint_directory(asked)
    config = model_config(directory, "auto", "float32")
    kind, steps = linears_of(asked, config, CPU, FLOAT), steps_of(config)

    def take(config: ModelConfig, kind: LinearKind, dtype: torch.dtype) -> Any:
        return loader.load_weights(directory, config, dtype, CPU, kind)

    whole = real(rank_logits(config, take(config, kind, FLOAT), Shard(0, 1), steps))
    for logits in logits_of_ranks(config, 2, kind, steps, take=take):
        torch.testing.assert_close(real(logits), whole, atol=1e-4, rtol=1e-4)


# -- Adapters


def test_adapters_change_what_they_change_in_one_rank() -> None:
    check_adapters("llama-biases", exact=False)


@pytest.mark.battery
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt-oss", "deepseek-v3", "granite-hybrid", "qwen3.5-moe"])
def test_adapters_of_families(name: str, exact: bool) -> None:
    check_adapters(name, exact)


def check_adapters(name: str, exact: bool) -> None:
    """Random changes of all layers, for some of the tokens."""
    config = config_of(name)
    steps = steps_of(config)

    def take(config: ModelConfig, kind: LinearKind, dtype: torch.dtype, changed: bool = True) -> Any:
        adaptable = kind.plain if isinstance(kind, Sharding) else kind
        assert isinstance(adaptable, Adaptable)
        weights = random_weights(config, kind, dtype)
        for place_name, place in adaptable.places.items():
            if changed:
                place.put(2, random_change(place_name, place))
        return weights

    def new() -> Adaptable:
        return Adaptable(Packed, 2, 8, ("*",))

    whole = real(rank_logits(config, take(config, new(), FLOAT), Shard(0, 1), steps, with_slots=True))
    plain = real(rank_logits(config, take(config, new(), FLOAT, changed=False), Shard(0, 1), steps, with_slots=True))
    assert (whole - plain).abs().max() > 0.1
    for size in (2, 4):
        for logits in logits_of_ranks(config, size, new, steps, take=take, exact=exact, with_slots=True):
            torch.testing.assert_close(real(logits), whole, atol=1e-4, rtol=1e-4)


def random_change(name: str, place: Any) -> Change:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    outputs, inputs = place.part.out_features, place.part.in_features
    if place.of_rows is not None:
        outputs, inputs = inputs, outputs
    count = place.num_experts
    a, b = (torch.randn(count or 1, *shape, generator=generator) * 0.1 for shape in ((RANK, inputs), (outputs, RANK)))
    tiles, scale = torch.stack([*map(tiles_of, b)]), torch.full((count or 1,), 2.0)
    if not count:
        a, tiles, scale = a[0], tiles[0], scale[0]
    return Change(a if place.of_rows is None else a.t().contiguous(), tiles, scale)


# -- Greedy tokens


@pytest.mark.parametrize("size", [2, 4])
def test_the_likeliest_token_of_all_ranks(size: int) -> None:
    """The first of equally likely ones; none where a logit is not finite; of 9 tokens ranks have other numbers."""
    torch.manual_seed(3)
    logits = torch.randn(40, 9).round(decimals=1)
    logits[:10] = torch.randint(0, 2, (10, 9)).float()
    logits[10, 7], logits[11, 1], logits[12, 8] = float("nan"), float("inf"), 9.0
    logits[13], logits[14, :8], logits[15, :5] = float("-inf"), float("-inf"), float("-inf")

    def joined(group: RankGroup, rank: int) -> Tensor:
        rows = Shard(rank, size).own_rows(9)
        own, first = logits[:, rows].contiguous(), torch.tensor([rank * len(rows)])
        head = VocabularyRows(Dense(torch.zeros(len(rows), 1), None), first, Ranks(group, size, exact=False), 9)
        tokens = greedy_tokens_reference(own)
        head.join_greedy(own, tokens)
        assert torch.equal(head.gathered(own).nan_to_num(), logits.nan_to_num())
        return tokens

    for tokens in of_ranks(size, joined):
        assert torch.equal(tokens, greedy_tokens_reference(logits))


# -- What is refused


def taken(name: str, size: int, *changes: tuple[str, Any], kind: LinearKind = Dense, **how: Any) -> Any:
    config = config_of(name, *changes)
    rank_config(config, Shard(0, size))
    return family_of(config).describe(config, linears=Sharding(kind, Shard(0, size, **how), RankGroup.alone()))


def test_heads_that_ranks_cannot_share_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must divide num_attention_heads=8, given 3"):
        taken("llama", 3)
    with pytest.raises(ValueError, match="divide, or be a multiple of, num_key_value_heads=3, given 2"):
        taken("llama", 2, ("hidden_size", 96), ("num_attention_heads", 6), ("num_key_value_heads", 3))
    with pytest.raises(ValueError, match="tensor_parallel_size must divide intermediate_size=161, given 2"):
        taken("llama", 2, ("intermediate_size", 161))
    with pytest.raises(ValueError, match="tensor_parallel_size must divide num_experts=5, given 2"):
        taken("mixtral", 2, whole_experts=True)
    with pytest.raises(ValueError, match=r"o_proj has groups of 32, and shares are 80 of 160 inputs"):
        taken("llama", 2, ("head_dim", 20), kind=Quantizing(Dense, FLOAT, SCHEMES["int4"]))


def test_exact_sums_need_eight_parts() -> None:
    with pytest.raises(ValueError, match="must be 1, 2, 4 or 8 with tensor_parallel_exact=True"):
        Shard(0, 16, exact=True)
    with pytest.raises(ValueError, match=r"multiple of 8: model\.layers.0.conv\.out_proj has 84"):
        taken("lfm2", 2, exact=True)


def test_a_layer_without_a_rule_is_refused_by_name() -> None:
    config = config_of("llama")
    family = family_of(config)
    more = with_tensor(family, lambda source: source.tensor("model.extra.weight", (4,)))
    with pytest.raises(ValueError, match=r"nothing says how ranks share model\.extra\.weight, given 2"):
        more.describe(config, linears=Sharding(Dense, Shard(0, 2), RankGroup.alone()))


def with_tensor(family: Any, take: Any) -> Any:
    return dataclasses.replace(family, take=lambda config, source: (take(source), family.take(config, source))[1])


def test_units() -> None:
    kv = Section(8, 2, "num_key_value_heads", repeats=True)
    assert [Shard(rank, 4).own((kv,)).tolist() for rank in range(4)] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert Shard(1, 2).own((kv, of_elements(4))).tolist() == [4, 5, 6, 7, 10, 11]
    assert [Shard(rank, 4).own_rows(9).tolist() for rank in (2, 3)] == [[6, 7, 8], [8, 8, 8]]
