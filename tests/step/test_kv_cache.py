"""The KV cache's dtypes, sizes and tensors."""

import dataclasses

import pytest
import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.registry import family
from compiled_llm.models.weights import tensors
from compiled_llm.step.kv_cache import allocate, bytes_per_token, describe, layer_dtypes, num_tensors
from tests.families import checkpoint

FP8 = torch.float8_e4m3fn


def model_config(num_layers: int = 3, num_kv_heads: int = 2, head_dim: int = 128) -> ModelConfig:
    config = read_config(checkpoint("llama"))
    return dataclasses.replace(config, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)


def dtypes(dtype: torch.dtype, **arguments) -> tuple[torch.dtype, ...]:
    return layer_dtypes(EngineConfig(**arguments), dtype, model_config())


def test_each_layers_dtype() -> None:
    half = torch.bfloat16
    assert dtypes(half) == dtypes(half, kv_cache_dtype="bfloat16") == (half,) * 3
    assert dtypes(half, kv_cache_dtype="int8") == (torch.int8,) * 3
    assert dtypes(half, kv_cache_dtype="fp8", kv_cache_skip_layers=(2, 0)) == (half, FP8, half)


def test_what_the_model_does_not_allow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'auto', the model's dtype, 'float32', or one of 'int8', 'fp8', given 'bfl"):
        dtypes(torch.float32, kv_cache_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"kv_cache_skip_layers must be layers of the model, 0 to 2, given 3"):
        dtypes(torch.float32, kv_cache_dtype="int8", kv_cache_skip_layers=(0, 3))
    sharing, config = (
        read_config(checkpoint("gemma4")),
        EngineConfig(kv_cache_dtype="int8", kv_cache_skip_layers=(1, 3)),
    )
    with pytest.raises(ValueError, match="layers with a cache of their own, given 3, which reads that of layer 1"):
        layer_dtypes(config, torch.float32, sharing)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("quantised", [torch.int8, FP8])
def test_bytes_per_token_are_those_of_the_tensors(head_dim: int, quantised: torch.dtype) -> None:
    config = model_config(head_dim=head_dim)
    full = bytes_per_token(config, (torch.bfloat16,) * 3)
    assert full == 3 * 2 * 2 * head_dim * 2
    assert bytes_per_token(config, (quantised,) * 3) * 2 * head_dim == full * (head_dim + 4)
    for kinds in ((torch.bfloat16,) * 3, (quantised,) * 3, (quantised, torch.float32, quantised)):
        cache = allocate(config, kinds, num_blocks=5, block_size=8, device=torch.device("cpu"))
        held = sum(t.numel() * t.element_size() for t in tensors(cache))
        assert held == bytes_per_token(config, kinds) * 5 * 8


def test_the_tensors_are_zero_and_only_quantised_layers_have_scales() -> None:
    cache = allocate(model_config(), (torch.int8, torch.float16, FP8), 4096, 8, torch.device("cpu"))
    for layer, dtype in zip(cache, (torch.int8, torch.float16, FP8), strict=True):
        assert (layer.k.dtype, layer.v.dtype) == (dtype, dtype)
        assert layer.k.shape == layer.v.shape == (4096, 2, 8, 128)
        assert not layer.k.view(torch.uint8)[-1].any()
    assert (cache[1].k_scale, cache[1].v_scale) == (None, None)
    for scale in (cache[0].k_scale, cache[0].v_scale, cache[2].k_scale, cache[2].v_scale):
        assert scale is not None
        assert (scale.shape, scale.dtype, scale.count_nonzero()) == ((4096, 2, 8), torch.float32, 0)
    assert len({t.data_ptr() for t in tensors(cache)}) == 10


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v2", "qwen3-next", "lfm2"])
def test_layers_on_a_cpu_lie_together_and_a_block_of_all_is_one_piece(name: str, kind: str) -> None:
    """So that a short request takes few pages. What has another number of blocks, or slots, has a piece of its own."""
    config = read_config(checkpoint(name))
    window = getattr(config, "sliding_window", None)
    kinds = [*layer_dtypes(EngineConfig(kv_cache_dtype=kind), torch.bfloat16, config)]
    kinds[-1] = torch.bfloat16  # as in kv_cache_skip_layers

    def made(num_blocks: int, num_slots: int) -> tuple[list[Tensor], list[list[Tensor]]]:
        places = {window: 3} if window else {}
        cache = allocate(config, kinds, num_blocks, 8, torch.device("cpu"), places, num_slots)
        counts = [num_blocks, *places.values(), num_slots]
        return tensors(cache), [[tensor for tensor in tensors(cache) if len(tensor) == count] for count in counts]

    cache, groups = made(5, 4)
    assert sum(map(len, groups)) == len(cache)
    assert bool(groups[-1]) == (name in ("qwen3-next", "lfm2"))
    for group in filter(None, groups):
        first, end = group[0].data_ptr(), group[0].data_ptr()
        (row,) = {tensor.stride(0) * tensor.itemsize for tensor in group}
        for tensor in group:
            assert 0 <= tensor.data_ptr() - end < tensor.itemsize, "they follow one another"
            assert tensor[:1].is_contiguous()
            end = tensor.data_ptr() + tensor[0].nbytes
        assert 0 <= row - (end - first) < 64, "and nothing but the rest of a cache line is behind them"
    assert [one.stride() for one in made(7, 6)[0]] == [one.stride() for one in cache], "compiled code has them"


def test_description() -> None:
    config, half = model_config(), torch.bfloat16
    assert describe(config, (half,) * 3, half) == "bfloat16, 3072 bytes a token"
    assert describe(config, (torch.int8,) * 3, half) == "int8, 1584 bytes a token, 51.6% of bfloat16's 3072"
    mixed = describe(config, (FP8, half, FP8), half)
    assert mixed == "fp8 (bfloat16 in layers 1), 2080 bytes a token, 67.7% of bfloat16's 3072"


def test_a_layer_that_shares_a_cache_has_no_tensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cpu, kinds = model_config(), torch.device("cpu"), (torch.int8,) * 3
    llama = family(config.architecture)
    specs = [*llama.layers(config)[:2], dataclasses.replace(llama.layers(config)[2], shares_cache_of=1)]
    alone = bytes_per_token(config, kinds)
    shared = dataclasses.replace(llama, layers=lambda config: tuple(specs))
    monkeypatch.setattr("compiled_llm.models.registry.family_of", lambda config: shared)
    cache = allocate(config, kinds, 5, 8, cpu)
    assert cache[2] is cache[1]
    assert bytes_per_token(config, kinds) * 3 == alone * 2
    assert num_tensors(config, kinds) == len(tensors(cache)) == 8
