"""What a quantised KV cache costs in quality and saves in memory, for one model on one text.

The text is teacher-forced (``teacher_forcing.py``): once with a cache in the model's own dtype and once with the
quantised one. Then once for each layer with its cache alone quantised: the divergence that it causes, and the error of
its attention output. Earlier layers are not quantised then, so both outputs come from equal queries, keys and values.

A layer is worth keeping in the model's dtype if it causes more than twice the mean KL divergence of the layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_llm.api import tables
from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.models.registry import family_of
from compiled_llm.ops.torch_private import TorchDispatchMode
from compiled_llm.quality import teacher_forcing
from compiled_llm.quality.teacher_forcing import Comparison, Model, run_chunk, summary, worth_keeping
from compiled_llm.quantizing.texts import Text, Window
from compiled_llm.step.kv_cache import bytes_per_token, describe, dtype_name
from compiled_llm.system import hardware


class AttentionOutputs(TorchDispatchMode):
    """Keeps what the attention op returns while this is active, a tensor for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.compiled_llm.paged_attention.default:
            self.outputs.append(result)
        return result


def run_with_attention(model: Model, kv_cache: KVCache, token_ids: Tensor, start: int) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, V]`` and each layer's attention output, for a chunk whose first token has position ``start``."""
    with AttentionOutputs() as attention:
        logits, _ = run_chunk(model, kv_cache, token_ids, start)
    return logits, attention.outputs


def compare(
    model: Model, dtypes: Sequence[torch.dtype], windows: list[Window], chunk: int, title: str = "windows"
) -> Comparison:
    """Run the model over the windows with a cache of ``dtypes``, one for each layer, and with one in its own dtype."""
    return teacher_forcing.compare(model, model, dtypes, windows, chunk, title, run_with_attention)


def quantised_layers(config: ModelConfig, skipped: Sequence[int]) -> list[int]:
    """The layers that have a KV cache of their own, without those ``skipped``."""
    own = {
        layer
        for layer, spec in enumerate(family_of(config).layers(config))
        if isinstance(spec, AttentionSpec) and spec.shares_cache_of is None
    }
    return sorted(own - set(skipped))


def measure(engine: EngineConfig, text: Text, chunk: int) -> dict[str, Any]:
    """The report in plain values.

    Args:
        engine: names the model, its dtype, the dtype of the cache and the layers that are left out.
        chunk: tokens of a step.

    Raises:
        ValueError: the engine would refuse an argument, or no layer is left to quantise.
        BadScaleError: a scale of the cache is zero or not finite.
    """
    model = teacher_forcing.load_model(engine)
    dtypes = teacher_forcing.cache_dtypes(model, engine)
    quantised = quantised_layers(model.config, engine.kv_cache_skip_layers)
    if not quantised:
        raise ValueError("--kv-cache-skip-layers must leave a layer to quantise, given all of them")
    windows = text.windows(engine, model.config, model.device)

    def alone(layer: int) -> list[torch.dtype]:
        return [dtype if i == layer else model.dtype for i, dtype in enumerate(dtypes)]

    whole = summary(compare(model, dtypes, windows, chunk, "all layers"))
    layers = {}
    for layer in quantised:
        comparison = compare(model, alone(layer), windows, chunk, f"layer {layer}")
        layers[layer] = {"attention_error": comparison.output_errors[layer], **summary(comparison)}
    kl_alone = {layer: figures["kl_mean"] for layer, figures in layers.items()}
    return {
        "report": "kv_cache",
        "model": teacher_forcing.model_name(engine),
        "dtype": dtype_name(model.dtype),
        "device": str(model.device),
        "text": text.name,
        "windows": len(windows),
        "chunk": chunk,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "kv_cache_skip_layers": engine.kv_cache_skip_layers,
        "kv_cache": describe(model.config, dtypes, model.dtype),
        "bytes_per_token": bytes_per_token(model.config, dtypes),
        "bytes_per_token_unquantised": bytes_per_token(model.config, [model.dtype] * len(dtypes)),
        **whole,
        "layers": layers,
        "ranking": sorted(kl_alone, key=lambda layer: -kl_alone[layer]),
        "worth_keeping": worth_keeping(kl_alone),
        "machine": hardware.describe(model.device),
    }


def text_of(found: dict[str, Any]) -> str:
    """The report for a person: all layers together, each layer alone, and which of them to keep."""
    own, cut = found["dtype"], f"{found['windows']} windows, {found['chunk']} tokens a step"
    rows = {
        "model": f"{found['model']}, {own} on {found['device']}",
        "text": f"{found['text']}: {found['tokens']} tokens, {cut}",
        "KV cache": found["kv_cache"],
        "KL": f"mean {found['kl_mean']:.3g}, p99 {found['kl_p99']:.3g}, max {found['kl_max']:.3g} nats a token",
        f"perplexity in {own}": f"{found['perplexity']:.4f}",
        "perplexity, quantised": f"{found['perplexity_quantised']:.4f}, {found['perplexity_change']:+.4%}",
        "top-1": f"the same for {found['top1_agreement']:.3%} of the tokens",
    }
    layers = found["layers"]
    total = sum(figures["kl_mean"] for figures in layers.values()) or 1.0
    each = [
        {"layer alone": str(layer), "attention error": f"{figures['attention_error']:.3%}"}
        | {"KL mean": figures["kl_mean"], "share": f"{figures['kl_mean'] / total:.1%}", "KL p99": figures["kl_p99"]}
        for layer, figures in layers.items()
    ]
    advice = teacher_forcing.advice(
        own, found["worth_keeping"], found["ranking"], lambda kept: f"--kv-cache-skip-layers {','.join(map(str, kept))}"
    )
    return f"{tables.titled('KV cache, quantised', rows)}\n\n{tables.text_table(each)}\n\n{advice}"
