"""The arithmetic of bytes and operations, against transformers' parameters and the products that torch counts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.config_file import read_config
from compiled_llm.models.family import Description
from compiled_llm.models.inputs import LayerCache, StateCache
from compiled_llm.models.linears.quantized import Quantized
from compiled_llm.models.registry import family, layers_of
from compiled_llm.models.weights import experts, linears, tensors
from compiled_llm.report.roofline import ModelWork, StepWork, num_pairs, windows_of
from compiled_llm.step.kv_cache import allocate, bytes_per_layer, bytes_per_slot
from tests.checkpoint import test_reader as published
from tests.families import CONFIGS, HYBRID_CONFIGS, checkpoint, transformers_model
from tests.models.quantized.test_gptq import AWQ, GPTQ

KV_BYTES = 1000  # of all layers


def model_work(name: str) -> ModelWork:
    config = read_config(checkpoint(name))
    return ModelWork.of(config, description(name).weights, [KV_BYTES] + [0] * (config.num_layers - 1))


def description(name: str) -> Description:
    config = read_config(checkpoint(name))
    return family(config.architecture).describe(config)


def numbers_of(weights: Any) -> list[torch.Tensor]:
    """Tensors that transformers has as numbers: the weights of norms without one, and the scale of Gemma 4's inputs."""
    inputs = getattr(weights, "per_layer_inputs", None)
    v_norms = [getattr(layer.attention, "v_norm", None) for layer in weights.layers]
    ones = [norm for norm in v_norms if norm is not None]
    mlps = [getattr(layer, "mlp", None) for layer in weights.layers]
    shared = [getattr(mlp, "shared", None) for mlp in mlps]
    ones += [part.one for part in (*mlps, *shared) if hasattr(part, "one")]
    return ones if inputs is None else [*ones, inputs.scale]


def parameters_of(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """All that a step reads, of experts all, but for the embedding, the head and tables of which it reads rows."""
    buffers = ("correction_bias", "expert_bias", "layer_scalar")
    parameters = dict(model.named_parameters())
    parameters |= {key: buffer for key, buffer in model.named_buffers() if key.endswith(buffers)}
    rows = ["transformer.wpe.weight", "model.embed_tokens_per_layer.weight"]
    once = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return {key: p for key, p in parameters.items() if key not in rows and all(p is not other for other in once)}


def weight_bytes(name: str, model: transformers.PreTrainedModel) -> int:
    """What a step of one token reads of weights, besides a row of its embedding."""
    layers, head = experts(description(name).weights), model.get_output_embeddings().weight
    total = sum(parameter.nbytes for parameter in parameters_of(model).values()) + head.nbytes
    total -= sum(layer.nbytes // layer.num_experts * (layer.num_experts - layer.top_k) for layer in layers)
    return total + sum(tensor.nbytes for tensor in numbers_of(description(name).weights))


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_and_operations_of_one_token_are_those_of_the_model(name: str) -> None:
    model = transformers_model(name)
    parameters, none = dict(model.named_parameters()), torch.empty(1, 0)
    embedding = model.get_input_embeddings().weight
    positions = parameters.get("transformer.wpe.weight", none)
    per_layer = parameters.get("model.embed_tokens_per_layer.weight", none)
    work = model_work(name)
    layers = experts(description(name).weights)
    step = StepWork.of([(0, 1)], work.windows, num_experts=sum(layer.top_k for layer in layers) / 2)
    rows = sum(table[0].nbytes for table in (embedding, positions, per_layer))
    config = read_config(checkpoint(name))
    readers = 1 + sum(layer.shares_cache_of == 0 for layer in family(config.architecture).layers(config))
    assert work.bytes(step) == weight_bytes(name, model) + rows + (1 + readers) * KV_BYTES  # of a key, written and read

    model.set_attn_implementation("eager")  # whose products are counted
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.tensor([[5]]))
    rotary = counter.get_total_flops() - work.flops(step) + more_over_latents(config)
    assert 0 <= rotary <= config.head_dim, "transformers multiplies for the angles too, and nothing else"


def more_over_latents(config: Any) -> int:
    """Operations of a pair over latents less those of heads' own keys and values, which transformers makes."""
    if not hasattr(config, "kv_lora_rank"):
        return 0
    of_heads = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    over_latents = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    return config.num_layers * 2 * config.num_heads * (over_latents - of_heads)


def test_what_grows_with_tokens_contexts_and_rows() -> None:
    work = model_work("qwen3")
    one, two = StepWork.of([(99, 1)]), StepWork.of([(99, 1), (49, 1)])
    assert work.bytes(two) - work.bytes(one) == 51 * KV_BYTES + work.embedding_bytes_per_token
    assert work.flops(two) - work.flops(one) == (
        work.linear_flops_per_token + work.head_flops_per_row + work.last_flops_per_row + 50 * work.per_key[0][1]
    )
    nothing_sampled = StepWork(num_steps=1, num_tokens=8, num_keys=8, num_pairs=36)
    assert work.bytes(StepWork.of([(0, 8)])) - work.bytes(nothing_sampled) == work.head_bytes_per_step
    assert work.flops(StepWork()) == work.bytes(StepWork()) == 0


@pytest.mark.parametrize("name", HYBRID_CONFIGS)
def test_bytes_of_a_hybrid_model_are_those_of_its_tensors(name: str) -> None:
    """Of a decode after 99 tokens: weights, 100 keys and values read and one written, states read and written."""
    model, config = transformers_model(name), read_config(checkpoint(name))
    dtypes = [torch.float32] * len(layers_of(config))
    cache = allocate(config, dtypes, num_blocks=100, block_size=1, device=torch.device("cpu"), num_slots=2)
    keys = sum(t.nbytes for layer in cache if isinstance(layer, LayerCache) for t in (layer.k, layer.v))
    slots = sum(t.nbytes for layer in cache if isinstance(layer, StateCache) for t in layer if t is not None)
    per_layer, per_slot = bytes_per_layer(config, dtypes), bytes_per_slot(config, torch.float32)
    work = ModelWork.of(config, description(name).weights, per_layer, per_slot)
    chosen = sum(layer.top_k for layer in experts(description(name).weights)) / 2
    row = model.get_input_embeddings().weight[0].nbytes
    assert keys > 0
    assert slots > 0
    read_and_written = keys + keys / 100 + 2 * slots / 2
    decode = StepWork.of([(99, 1)], work.windows, num_experts=chosen)
    assert work.bytes(decode) == weight_bytes(name, model) + row + read_and_written


def test_states_are_read_and_written_once_a_step() -> None:
    """A prompt's first chunk reads none, since it starts from zeros."""
    model = read_config(checkpoint("lfm2"))
    weights = description("lfm2").weights
    work = ModelWork.of(model, weights, [0] * model.num_layers, state_bytes := bytes_per_slot(model, torch.float32))
    assert state_bytes == 3 * 3 * model.hidden_size * 4  # layers, tokens that a convolution looks back, channels
    without = ModelWork.of(model, weights, [0] * model.num_layers)
    for requests, num_states in (([(0, 8)], 1), ([(8, 1)], 2), ([(8, 1), (0, 3), (4, 4)], 5), ([], 0)):
        step = StepWork.of(requests)
        assert work.bytes(step) - without.bytes(step) == num_states * state_bytes


def test_pairs_are_those_of_a_causal_mask() -> None:
    for computed, count in [(0, 1), (0, 7), (9, 1), (9, 7)]:
        mask = torch.ones(count, computed + count).tril(diagonal=computed)
        assert num_pairs(computed, count) == mask.sum()


def test_the_slower_of_memory_and_arithmetic_is_the_limit() -> None:
    work, step = model_work("llama"), StepWork.of([(0, 16)])
    assert work.seconds(step, 1e3, 1e30) == work.bytes(step) / 1e3
    assert work.seconds(step, 1e30, 1e3) == work.flops(step) / 1e3


def test_the_scales_of_a_quantised_cache_are_read_too() -> None:
    config = read_config(checkpoint("qwen3"))
    full = bytes_per_layer(config, [torch.float32] * config.num_layers)
    codes = bytes_per_layer(config, [torch.int8] * config.num_layers)
    step = StepWork.of([(15, 1)])
    of_full, of_codes = (ModelWork.of(config, description("qwen3").weights, each) for each in (full, codes))
    difference = of_full.bytes(step) - of_codes.bytes(step)
    heads = 2 * config.num_layers * config.num_kv_heads
    assert difference == 17 * heads * (4 * config.head_dim - (config.head_dim + 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("quantised", "fields"),
    [
        (published.as_awq, {**AWQ, "group_size": 16}),
        (published.as_gptq_in_order, {**GPTQ, "group_size": 16, "desc_act": True}),
    ],
    ids=["awq", "gptq"],
)
def test_a_published_checkpoint_is_counted_as_it_is_kept(
    tmp_path: Path, quantised: Callable[[torch.Tensor], dict], fields: dict[str, Any], dtype: str
) -> None:
    """Its scales are float16, whatever the model's dtype is."""
    published.write(tmp_path, checkpoint("qwen3"), quantised, fields)
    sizes: dict[str, Any] = {"bucket_sizes": (1,), "max_model_len": 64, "num_kv_blocks": 20, "enforce_eager": True}
    with CompiledEngine(str(tmp_path / "quantised"), dtype=dtype, progress="off", **sizes) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        weights = engine.runner.steps.weights
        layers = [layer for layer in linears(weights.layers) if isinstance(layer, Quantized)]
        assert {layer.weight.scales.dtype for layer in layers} == {torch.float16}
        config, size = engine.model_config, engine.runner.dtype.itemsize
        read = sum(
            tensor.nbytes for tensor in tensors((weights.layers, weights.final_norm))
        )  # of sizes without padding
        read += (config.vocab_size + 1) * config.hidden_size * size  # the head, and a row of it for the token
        keys = 1 + 4  # written and read
        read += keys * sum(bytes_per_layer(config, engine.runner.cache_dtypes))
        decode = engine.report(measure_limits=False).phase("decode")
        assert decode is not None
        assert decode.bytes == read


def test_layers_with_a_window_have_its_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for computed, count in [(0, 1), (0, 7), (0, 40), (3, 2), (9, 1), (9, 30), (40, 7)]:
        mask = torch.ones(count, computed + count).tril(diagonal=computed).triu(diagonal=computed - 8 + 1)
        (step,) = StepWork.of([(computed, count)], windows=(8,)).in_windows
        assert step == (mask.any(0).sum(), mask.sum())

    config = read_config(checkpoint("llama"))
    llama = family(config.architecture)
    full, windowed = llama.layers(config)[0], dataclasses.replace(llama.layers(config)[1], window=8)
    with_windows = dataclasses.replace(llama, layers=lambda config: (full, windowed))
    monkeypatch.setattr("compiled_llm.models.registry.family_of", lambda config: with_windows)
    work = ModelWork.of(config, description("llama").weights, (400, 600))
    assert work.windows == windows_of(config) == (8,)
    requests = [(100, 1), (2, 1)]
    step, without = (StepWork.of(each, work.windows) for each in (requests, [(0, 1), (0, 1)]))
    assert work.bytes(step) - work.bytes(without) == 102 * 400 + (7 + 2) * 600
    assert work.flops(step) - work.flops(without) == (102 + 7 + 2) * 4 * config.num_heads * config.head_dim
