"""Report what a quantised KV cache costs in quality and saves in memory, for one model on one text.

    python scripts/kv_report.py --kv-cache-dtype int8
    python scripts/kv_report.py --model DIR --kv-cache-dtype fp8 --text FILE --skip-layers 0,5

The text is teacher-forced: the model runs over it twice in lock-step, once with a cache in its own dtype and once with
the quantised one, uncompiled, in windows of the model's length and in chunks, so that attention reads what earlier
chunks left in the cache. Without ``--text`` it is the files of Python's standard library that the demo model was never
trained on, those whose hash its ``training.json`` records. Measured are

- the KL divergence of the next-token distributions, D(own dtype || quantised), in nats, for every token;
- the perplexity of both, and how often their likeliest tokens agree;
- for each layer, with its cache alone quantised: the KL divergence that it causes, and the error of its attention
  output, the Euclidean norm over all tokens of the difference to the output without quantisation, relative to that
  output's. Earlier layers are not quantised then, so both outputs come from the same queries, keys and values.

A layer is worth keeping in the model's dtype if it causes more than twice the mean KL divergence of the layers; then
``--skip-layers`` measures the model with it kept. In half precision, values that round the other way cost a divergence
of their own; ``--dtype float32`` shows that of the quantisation alone.

Ends in one JSON line. Exit status: 0, 1 when a scale is zero or not finite, 2 for bad arguments.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench.own_checkout
import teacher_forcing
import torch
from bench import tables
from teacher_forcing import BadScaleError, Comparison, Model, Window, read_windows, run_chunk, summary, worth_keeping
from torch import Tensor

from compiled_llm.api.command_line import FlagParser, errors_end, integers
from compiled_llm.api.config import QUANTISED_DTYPES, EngineConfig
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.models.registry import family_of
from compiled_llm.ops.torch_private import TorchDispatchMode
from compiled_llm.step.kv_cache import bytes_per_token, describe, dtype_name
from compiled_llm.system import hardware as machine


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


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, metavar="DIR", help="default: the bundled demo model")
    parser.add_argument("--kv-cache-dtype", choices=QUANTISED_DTYPES, required=True)
    parser.add_argument("--skip-layers", type=integers, default=(), metavar="INT[,INT...]", help="not quantised")
    dtypes = "of the model: auto (the checkpoint's), float32, bfloat16, float16"
    parser.add_argument("--dtype", default="auto", help=dtypes)
    parser.add_argument("--device", default="auto")
    least = teacher_forcing.add_text_flags(parser)
    tables.add_json_flag(parser)
    return parser.parse_checked(lambda args: tables.check_target("--json", args.json), **least)


def load_model(args: argparse.Namespace) -> tuple[Model, tuple[torch.dtype, ...]]:
    """The model, and the dtype of each layer's cache. ``ValueError`` for what the engine would refuse."""
    cache = {"kv_cache_dtype": args.kv_cache_dtype, "kv_cache_skip_layers": args.skip_layers}
    engine_config = EngineConfig(dtype=args.dtype, device=args.device, **cache)
    model = teacher_forcing.load_model(engine_config, args.model)
    dtypes = teacher_forcing.cache_dtypes(model, engine_config)
    if not quantised_layers(model.config, args.skip_layers):
        raise ValueError("--skip-layers must leave a layer to quantise, given all of them")
    return model, dtypes


def quantised_layers(config: ModelConfig, skipped: Sequence[int]) -> list[int]:
    """The layers that have a KV cache of their own, without those ``skipped``."""
    own = {
        layer
        for layer, spec in enumerate(family_of(config).layers(config))
        if isinstance(spec, AttentionSpec) and spec.shares_cache_of is None
    }
    return sorted(own - set(skipped))


def main() -> int:
    args = parse_arguments()
    with errors_end("kv_report"):
        model, dtypes = load_model(args)
        text, windows = read_windows(args, model.config, model.device)

    def alone(layer: int) -> list[torch.dtype]:
        return [dtype if i == layer else model.dtype for i, dtype in enumerate(dtypes)]

    quantised = quantised_layers(model.config, args.skip_layers)
    try:
        whole = summary(compare(model, dtypes, windows, args.chunk, "all layers"))
        each = {layer: compare(model, alone(layer), windows, args.chunk, f"layer {layer}") for layer in quantised}
    except BadScaleError as error:
        print(f"kv_report: refused: {error}", file=sys.stderr)
        return 1

    own, name = dtype_name(model.dtype), os.path.relpath(args.model)
    change, kl_change = whole["perplexity_change"], f"mean {whole['kl_mean']:.3g}, p99 {whole['kl_p99']:.3g}"
    rows = {
        "model": f"{name}, {own} on {model.device}",
        "text": f"{text}: {whole['tokens']} tokens, {len(windows)} windows, {args.chunk} tokens a step",
        "KV cache": describe(model.config, dtypes, model.dtype),
        "KL": f"{kl_change}, max {whole['kl_max']:.3g} nats a token",
        f"perplexity in {own}": f"{whole['perplexity']:.4f}",
        "perplexity, quantised": f"{whole['perplexity_quantised']:.4f}, {change:+.4%}",
        "top-1": f"the same for {whole['top1_agreement']:.3%} of the tokens",
    }
    tables.print_table("KV cache, quantised", rows)
    layers = {
        layer: {"attention_error": comparison.output_errors[layer], **summary(comparison)}
        for layer, comparison in each.items()
    }
    result = {"report": "kv_cache", "model": name, "dtype": own, "text": text, "windows": len(windows)}
    result |= {key: getattr(args, key) for key in ("kv_cache_dtype", "skip_layers", "chunk")}
    result["bytes_per_token"] = bytes_per_token(model.config, dtypes)
    result["bytes_per_token_unquantised"] = bytes_per_token(model.config, [model.dtype] * len(dtypes))
    result |= {**whole, "layers": layers, **print_layers(layers, own), "machine": machine.describe(model.device)}
    tables.finish(result, args.json)
    return 0


def print_layers(layers: dict[int, dict[str, float]], own: str) -> dict[str, list[int]]:
    """Print what each layer causes. Returns the layers in order of their divergence, and those worth keeping."""
    kl_alone = {layer: figures["kl_mean"] for layer, figures in layers.items()}
    total = sum(kl_alone.values()) or 1.0
    rows = [
        {"layer alone": str(layer), "attention error": f"{figures['attention_error']:.3%}"}
        | {"KL mean": figures["kl_mean"], "share": f"{kl_alone[layer] / total:.1%}", "KL p99": figures["kl_p99"]}
        for layer, figures in layers.items()
    ]
    print("\n" + tables.text_table(rows))
    keep, ranking = worth_keeping(kl_alone), sorted(kl_alone, key=lambda layer: -kl_alone[layer])
    some = f"Worth keeping in {own}, as each causes more than twice the mean KL:"
    none = f"No layer is worth keeping in {own}: none causes more than twice the mean KL. The first to keep is"
    print(f"\n{some if keep else none}")
    print(f"  --kv-cache-skip-layers {','.join(map(str, keep or ranking[:1]))}")
    return {"ranking": ranking, "worth_keeping": keep}


if __name__ == "__main__":
    sys.exit(main())
