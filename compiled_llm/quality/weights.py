"""What quantised weights cost in quality, and save in memory and time, for one model on one text.

The weights are rounded at load, as the engine's arguments say, or read from a quantised checkpoint of the same model.
The text is teacher-forced (``teacher_forcing.py``): once with the model as it is and once quantised. Also measured are

- for each decoder layer, and for the head and the embedding where they are quantised, with that one alone quantised:
  the KL divergence that it causes, and the error of its output. The output of a decoder layer is the hidden state after
  it, that of the head are the logits. The KV cache is in the model's dtype then;
- of weights that are rounded at load, how far they are from the checkpoint's, and the layer where that is the most;
- bytes of the weights: of all tensors as they are kept, and of linear layers without padding;
- the speed of one stream, tokens a second of a prompt and of a decode, by engines that take turns.

A layer is worth keeping in the model's dtype if it causes more than twice the mean KL divergence.
"""

import dataclasses
import functools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api import tables
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.inputs import KVCache
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.linears.quantized import Joined, Quantized, QuantizedExperts
from compiled_llm.models.linears.rounding import Rounding
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import linear_layers, tensors
from compiled_llm.quality.teacher_forcing import (
    Model,
    Run,
    advice,
    cache_dtypes,
    compare,
    load_model,
    model_name,
    run_chunk,
    step_input,
    summary,
    worth_keeping,
)
from compiled_llm.quantizing.texts import Text, Window
from compiled_llm.step.kv_cache import describe, dtype_name
from compiled_llm.system import hardware

ROUNDS = 5  # of each engine, for its speed
_KEPT_BY = {"head": "--quantization-head none", "embedding": "--quantization-embedding none"}


class QuantisedPart(NamedTuple):
    """Something of a model that is quantised: its name, the weights with it alone quantised, a run for its output."""

    name: str
    weights: Any
    run: Run


def is_quantised(weights: Any) -> bool:
    """Whether a linear layer in a weights tuple is."""
    return any(isinstance(linear, Quantized | QuantizedExperts | Joined) for linear in linear_layers(weights))


def layers_name(config: ModelConfig) -> str:
    """What decoder layers are called in names of tensors, before their number: "layers"."""
    found = (re.search(r"(\w+)\.0\.", name) for name in family_of(config).describe(config).taken)
    return next(match[1] for match in found if match)


def run_with_layer(
    model: Model, kv_cache: KVCache, token_ids: Tensor, start: int, layer: int
) -> tuple[Tensor, list[Tensor]]:
    """As ``run_chunk``, with the hidden state ``[T, D]`` after ``layer``, of a second run that ends there."""
    logits, _ = run_chunk(model, kv_cache, token_ids, start)
    step, functions, end = step_input(model, kv_cache, token_ids, start), family_of(model.config), layer + 1
    weights = model.weights._replace(layers=model.weights.layers[:end])
    layers = functions.layers(model.config)[:end]
    with torch.no_grad():
        hidden = functions.forward(weights, step, kv_cache[:end], model.config, for_queries(layers, len(token_ids)))
    return logits, [hidden]


def run_with_logits(model: Model, kv_cache: KVCache, token_ids: Tensor, start: int) -> tuple[Tensor, list[Tensor]]:
    logits, _ = run_chunk(model, kv_cache, token_ids, start)
    return logits, [logits]


def run_with_embedding(model: Model, kv_cache: KVCache, token_ids: Tensor, start: int) -> tuple[Tensor, list[Tensor]]:
    logits, _ = run_chunk(model, kv_cache, token_ids, start)
    return logits, [model.weights.embedding.rows(token_ids)]


def quantised_parts(own: Model, other: Model) -> Iterator[QuantisedPart]:
    """Decoder layers of ``other`` that have a quantised linear layer, and its head and embedding where they are."""
    mine, theirs = own.weights, other.weights
    name = layers_name(own.config)
    for i, layer in enumerate(theirs.layers):
        if is_quantised(layer):
            weights = mine._replace(layers=(*mine.layers[:i], layer, *mine.layers[i + 1 :]))
            yield QuantisedPart(f"{name}.{i}", weights, functools.partial(run_with_layer, layer=i))
    is_tied = mine.embedding is mine.head
    if is_quantised(theirs.head):
        also = {"embedding": theirs.embedding} if is_tied else {}
        yield QuantisedPart("head", mine._replace(head=theirs.head, **also), run_with_logits)
    if not is_tied and is_quantised(theirs.embedding):
        yield QuantisedPart("embedding", mine._replace(embedding=theirs.embedding), run_with_embedding)


def check_alike(own: ModelConfig, other: ModelConfig) -> None:
    """``ValueError`` unless the two models can be compared layer by layer."""
    if isinstance(own, TransformersConfig):
        raise ValueError(
            f"--model must have one of the architectures with a file of its own, see docs/models.md, given "
            f"{own.architecture}, which runs through transformers' modelling code"
        )
    for name in ("architecture", "num_layers", "hidden_size", "vocab_size"):
        if getattr(own, name) != getattr(other, name):
            raise ValueError(
                f"--quantized-model must have the {name} of --model, {getattr(own, name)}, given {getattr(other, name)}"
            )


def sizes_of(weights: Any) -> dict[str, int]:
    """Bytes of the weights."""
    return {
        "weight_bytes": sum(tensor.nbytes for tensor in tensors(weights)),
        "linear_bytes": sum(linear.nbytes for linear in linear_layers(weights)),
    }


def quality(
    own: Model,
    other: Model,
    dtypes: Sequence[torch.dtype],
    windows: list[Window],
    chunk: int,
    each_layer: bool,
    title: str,
) -> dict[str, Any]:
    """Of all that is quantised together, and of ``each_layer`` alone. ``dtypes``: of the KV cache of each layer."""
    parts = list(quantised_parts(own, other))
    if not parts:
        raise ValueError(f"{title}: no layer is quantised")
    result: dict[str, Any] = {**sizes_of(other.weights), **summary(compare(own, other, dtypes, windows, chunk, title))}
    if other.rounding is not None:
        result["weight_rounding"] = other.rounding._asdict()
    if not each_layer:
        return result
    alone: dict[str, dict[str, float]] = {}
    for part in parts:
        one, of_own = own._replace(weights=part.weights), [own.dtype] * len(dtypes)
        comparison = compare(own, one, of_own, windows, chunk, f"{title}, {part.name}", part.run)
        alone[part.name] = {"output_error": comparison.output_errors[0], **summary(comparison)}
    kl_alone = {name: figures["kl_mean"] for name, figures in alone.items()}
    ranking = sorted(kl_alone, key=lambda name: -kl_alone[name])
    return {**result, "layers": alone, "ranking": ranking, "worth_keeping": worth_keeping(kl_alone)}


def speed(engines: dict[str, CompiledEngine], prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Tokens a second of one stream, medians over ``ROUNDS`` in which the two engines take turns.

    Returns:
        ``prefill`` and ``decode`` of each engine by its name, and ``prefill_ratio`` and ``decode_ratio``: of the second
        engine's to the first's in the same round, medians.
    """
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(1 + ROUNDS):
        for name, engine in engines.items():
            times = engine.generate([prompt], params, use_tqdm=False, raise_on_error=True)[0].metrics
            assert times is not None
            start, first, end = times.first_scheduled_time, times.first_token_time, times.finished_time
            assert start is not None
            assert first is not None
            assert end is not None
            rates[name].append((len(prompt) / (first - start), (num_tokens - 1) / (end - first)))
    own, other = (each[1:] for each in rates.values())  # the first round warms up
    found: dict[str, Any] = {"prompt_tokens": len(prompt), "output_tokens": num_tokens}
    for place, what in enumerate(("prefill", "decode")):
        found[what] = {name: statistics.median(rate[place] for rate in each[1:]) for name, each in rates.items()}
        ratios = [theirs[place] / mine[place] for mine, theirs in zip(own, other, strict=True)]
        found[f"{what}_ratio"] = statistics.median(ratios)
    return found


class Streams(NamedTuple):
    """What the speed is measured on: tokens of a prompt and of its output, and whether engines compile."""

    prompt: int
    output: int
    enforce_eager: bool


def speeds(
    own: EngineConfig, others: Mapping[str, EngineConfig], prompt: list[int], streams: Streams
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The speed of each of ``others`` beside the model in its ``own`` dtype; two engines at a time."""
    length = len(prompt) + streams.output
    common: dict[str, Any] = {"max_model_len": length, "bucket_sizes": (1,), "num_kv_blocks": 2 + length // 16}
    common |= {"progress": "off", "enable_prefix_caching": False, "enforce_eager": streams.enforce_eager}
    found = {}
    with CompiledEngine.from_config(dataclasses.replace(own, **common)) as own_engine:
        for name, config in others.items():
            with CompiledEngine.from_config(dataclasses.replace(config, **common)) as engine:
                found[name] = speed({"own": own_engine, "quantised": engine}, prompt, streams.output)
    return found


def measure(
    own_config: EngineConfig,
    others: Mapping[str, EngineConfig],
    text: Text,
    chunk: int,
    each_layer: bool,
    streams: Streams | None,
) -> dict[str, Any]:
    """The report in plain values.

    Args:
        own_config: of the model as it is.
        others: of what is compared with it, by names for the report.
        chunk: tokens of a step.
        each_layer: also with each layer alone quantised.
        streams: None: no speed.

    Raises:
        ValueError: the engine would refuse an argument, no layer is quantised, or the models are unlike.
        BadScaleError: a scale of the KV cache is zero or not finite.
    """
    own = load_model(own_config)
    windows = text.windows(own_config, own.config, own.device)
    others = {name: dataclasses.replace(config, dtype=dtype_name(own.dtype)) for name, config in others.items()}
    kinds: dict[str, dict[str, Any]] = {}
    for name, config in others.items():
        other = load_model(config)
        check_alike(own.config, other.config)
        dtypes = cache_dtypes(other, config)
        kinds[name] = quality(own, other, dtypes, windows, chunk, each_layer, name)
        cache = describe(other.config, dtypes, other.dtype)
        del other
    result: dict[str, Any] = {"report": "weights", "model": model_name(own_config), "dtype": dtype_name(own.dtype)}
    result |= {"device": str(own.device), "text": text.name, "windows": len(windows), "chunk": chunk}
    result |= {"kv_cache": cache, **sizes_of(own.weights), "kinds": kinds, "machine": hardware.describe(own.device)}
    if streams is not None:
        longest = min(streams.prompt, own.config.max_position_embeddings - streams.output)
        if longest < 1:
            most = own.config.max_position_embeddings
            raise ValueError(f"--speed-tokens must be below the model's length, {most}, given {streams.output}")
        prompt = torch.cat([window.token_ids for window in windows])[:longest].tolist()
        del own
        for name, rates in speeds(own_config, others, prompt, streams).items():
            kinds[name]["speed"] = rates
    return result


def text_of(found: dict[str, Any]) -> str:
    """The report for a person: the model, a line for each kind, and for each kind its layers."""
    own, first = found["dtype"], next(iter(found["kinds"].values()))
    cut = f"{found['windows']} windows, {found['chunk']} tokens a step"
    rows = {
        "model": f"{found['model']}, {own} on {found['device']}",
        "text": f"{found['text']}: {first['tokens']} tokens, {cut}",
        "KV cache, quantised": found["kv_cache"],
        f"weights in {own}": f"{found['weight_bytes'] / 1e6:.1f} MB",
        f"perplexity in {own}": f"{first['perplexity']:.4f}",
    }
    if "speed" in first:
        rates = first["speed"]
        rows["speed, one stream"] = (
            f"{rates['prefill']['own']:.0f} tokens/s of a prompt of {rates['prompt_tokens']}, "
            f"{rates['decode']['own']:.0f} tokens/s of {rates['output_tokens']} after it"
        )
    kinds = [_row_of(name, kind, found["weight_bytes"]) for name, kind in found["kinds"].items()]
    layers = [_layers_of(name, kind, own) for name, kind in found["kinds"].items() if "layers" in kind]
    return "\n\n".join([tables.titled("Weights, quantised", rows), tables.text_table(kinds), *layers])


def _row_of(name: str, found: dict[str, Any], own_bytes: int) -> dict[str, Any]:
    row = {"weights": name, "perplexity": f"{found['perplexity_quantised']:.4f}"}
    row |= {"change": f"{found['perplexity_change']:+.3%}", "KL mean": found["kl_mean"], "KL p99": found["kl_p99"]}
    row |= {"top-1 the same": f"{found['top1_agreement']:.2%}", "bytes": f"{found['weight_bytes'] / own_bytes:.1%}"}
    if "weight_rounding" in found:
        row |= {"weights change by": str(Rounding(**found["weight_rounding"]))}
    if "speed" in found:
        rates = found["speed"]
        row |= {f"{what}, tokens/s": f"{rates[what]['quantised']:.0f}" for what in ("prefill", "decode")}
        row |= {f"{what}, times": f"{rates[f'{what}_ratio']:.2f}" for what in ("prefill", "decode")}
    return row


def _layers_of(name: str, found: dict[str, Any], own: str) -> str:
    """What each layer causes, and which to leave out."""
    total = sum(figures["kl_mean"] for figures in found["layers"].values()) or 1.0
    rows = [
        {f"{name}, alone": part, "output error": f"{figures['output_error']:.3%}", "KL mean": figures["kl_mean"]}
        | {"share": f"{figures['kl_mean'] / total:.1%}", "KL p99": figures["kl_p99"]}
        for part, figures in found["layers"].items()
    ]

    def flags(kept: Sequence[str]) -> str:
        return " ".join(_KEPT_BY.get(part, f"--quantization-skip {part}") for part in kept)

    return f"{tables.text_table(rows)}\n{advice(own, found['worth_keeping'], found['ranking'], flags)}"
