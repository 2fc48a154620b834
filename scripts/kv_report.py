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
import dataclasses
import hashlib
import json
import math
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench import tables
from torch import Tensor
from tqdm import tqdm

from compiled_llm import hardware as machine
from compiled_llm.command_line import FlagParser, errors_end, integers
from compiled_llm.config import QUANTISED_DTYPES, EngineConfig
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.registry import family_of
from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.torch_private import TorchDispatchMode
from compiled_llm.step.kv_cache import allocate, bytes_per_token, describe, dtype_name, layer_dtypes
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.worker import loader
from compiled_llm.worker.device import resolve_device

BLOCK_SIZE = 16
MAX_WINDOW = 4096  # of the default, for models whose own length would ask for a very large cache
WORTH_KEEPING = 2.0  # times the mean over the layers
ROWS_AT_ONCE = 64  # of logits, in float64


class BadScaleError(Exception):
    """A scale in the cache is zero or not finite."""


class Model(NamedTuple):
    config: ModelConfig
    weights: Any
    dtype: torch.dtype
    device: torch.device


class Window(NamedTuple):
    """Consecutive tokens, and the token after each of them: ``[T]`` each."""

    token_ids: Tensor
    targets: Tensor


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A quantised cache against one in the model's dtype, over all tokens of a text.

    Attributes:
        kl: divergence for each token, ``[T]`` float64, nats.
        losses: of the next tokens with the model's dtype and with the quantised cache, means in nats.
        top1: share of the tokens whose likeliest next token is the same.
        attention_errors: for each layer, of its attention output.
    """

    kl: Tensor
    losses: tuple[float, float]
    top1: float
    attention_errors: list[float]


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


def run_chunk(model: Model, kv_cache: KVCache, token_ids: Tensor, start: int) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, V]`` and each layer's attention output, for a chunk whose first token has position ``start``."""
    count, end = len(token_ids), start + len(token_ids)

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=model.device)

    step = StepInput(
        input_ids=token_ids,
        positions=tensor(range(start, end)),
        slot_mapping=tensor(range(start, end)),  # block 0 is the window's first
        query_start_loc=tensor([0, count]),
        seq_lens=tensor([end]),
        logits_indices=tensor(range(count)),
        block_table=tensor([range(len(kv_cache[0].k))]),
    )
    functions = family_of(model.config)
    layers = functions.layers(model.config)
    with torch.no_grad(), AttentionOutputs() as attention:
        hidden = functions.forward(model.weights, step, kv_cache, model.config, layers, count)
        logits = functions.head(model.weights, hidden[step.logits_indices], model.config)
    return logits, attention.outputs


def check_scales(kv_cache: KVCache, start: int, end: int) -> None:
    """``BadScaleError`` if a scale of the tokens at ``start..end - 1`` is zero, negative or not finite."""
    for layer, cache in enumerate(kv_cache):
        for name, scale in (("keys", cache.k_scale), ("values", cache.v_scale)):
            if scale is None:
                continue
            written = scale.transpose(1, 2).flatten(0, 1)[start:end]  # [tokens, K]
            bad = ~(written.isfinite() & (written > 0))
            if bad.any():
                token, head = bad.nonzero()[0].tolist()
                raise BadScaleError(
                    f"layer {layer}: the scale of the {name} of token {start + token}, KV head {head}, is "
                    f"{written[token, head].item()}; every scale must be a positive number"
                )


def compare(
    model: Model, dtypes: Sequence[torch.dtype], windows: list[Window], chunk: int, title: str = "windows"
) -> Comparison:
    """Run the model over the windows with a cache of ``dtypes``, one for each layer, and with one in its own dtype."""
    num_layers = len(dtypes)
    num_blocks = -(-max(len(window.token_ids) for window in windows) // BLOCK_SIZE)
    own_cache = allocate(model.config, (model.dtype,) * num_layers, num_blocks, BLOCK_SIZE, model.device)
    kv_cache = allocate(model.config, dtypes, num_blocks, BLOCK_SIZE, model.device)
    kl, losses, agreements = [], [], []
    error_squares, norm_squares = (torch.zeros(num_layers, dtype=torch.float64) for _ in range(2))
    for window in tqdm(windows, desc=title, unit="window", disable=None, leave=False):
        for start in range(0, len(window.token_ids), chunk):
            tokens, targets = (part[start : start + chunk] for part in window)
            own_logits, own_outputs = run_chunk(model, own_cache, tokens, start)
            logits, outputs = run_chunk(model, kv_cache, tokens, start)
            check_scales(kv_cache, start, start + len(tokens))
            for layer, (own, other) in enumerate(zip(own_outputs, outputs, strict=True)):
                error_squares[layer] += (other.double() - own.double()).square().sum().cpu()
                norm_squares[layer] += own.double().square().sum().cpu()
            agreements.append(own_logits.argmax(-1) == logits.argmax(-1))
            rows = (tensor.split(ROWS_AT_ONCE) for tensor in (own_logits, logits, targets.long()))
            for own_part, part, target in zip(*rows, strict=True):
                own_log_probs, log_probs = own_part.double().log_softmax(-1), part.double().log_softmax(-1)
                kl.append(F.kl_div(log_probs, own_log_probs, reduction="none", log_target=True).sum(-1))
                pair = [F.nll_loss(log_p, target, reduction="none") for log_p in (own_log_probs, log_probs)]
                losses.append(torch.stack(pair))
    own_loss, loss = torch.cat(losses, dim=1).mean(1).tolist()
    return Comparison(
        kl=torch.cat(kl).cpu(),
        losses=(own_loss, loss),
        top1=torch.cat(agreements).double().mean().item(),
        attention_errors=(error_squares / norm_squares).sqrt().tolist(),
    )


def held_out_texts() -> dict[str, str]:
    """Path -> text of the standard library's files that the demo model was not trained on, as they were then."""
    library, texts = Path(sysconfig.get_path("stdlib")), {}
    for record in json.loads((DEMO_MODEL / "training.json").read_text())["held_out_files"]:
        path = library / record["path"]
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == record["sha256"]:
            texts[record["path"]] = path.read_text(encoding="utf-8")
    if not texts:
        raise ValueError("this Python's standard library has none of the held-out files as they were: give --text FILE")
    return texts


def cut_windows(documents: list[list[int]], length: int, max_tokens: int | None, device: torch.device) -> list[Window]:
    """Windows of up to ``length`` tokens, none across documents, of the first ``max_tokens`` tokens."""
    windows, left = [], sum(map(len, documents)) if max_tokens is None else max_tokens
    for document in documents:
        tokens = torch.tensor(document, dtype=torch.int32, device=device)
        for start in range(0, len(document) - 1, length):
            end = min(start + length, start + left, len(document) - 1)
            if end > start:
                windows.append(Window(tokens[start:end], tokens[start + 1 : end + 1]))
                left -= end - start
    if not windows:
        raise ValueError("the text must have two tokens at least")
    return windows


def worth_keeping(kl_alone: dict[int, float]) -> list[int]:
    """The layers that cause more than twice the mean KL divergence, in order."""
    mean = sum(kl_alone.values()) / len(kl_alone)
    return sorted(layer for layer, kl in kl_alone.items() if kl > WORTH_KEEPING * mean)


def summary(comparison: Comparison) -> dict[str, float]:
    own, other = (math.exp(loss) for loss in comparison.losses)
    return {
        "tokens": len(comparison.kl),
        "kl_mean": comparison.kl.mean().item(),
        "kl_p99": comparison.kl.kthvalue(math.ceil(0.99 * len(comparison.kl))).values.item(),
        "kl_max": comparison.kl.max().item(),
        "perplexity": own,
        "perplexity_quantised": other,
        "perplexity_change": other / own - 1,
        "top1_agreement": comparison.top1,
    }


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, metavar="DIR", help="default: the bundled demo model")
    parser.add_argument("--kv-cache-dtype", choices=QUANTISED_DTYPES, required=True)
    parser.add_argument("--skip-layers", type=integers, default=(), metavar="INT[,INT...]", help="not quantised")
    dtypes = "of the model: auto (the checkpoint's), float32, bfloat16, float16"
    parser.add_argument("--dtype", default="auto", help=dtypes)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 (default: the demo model's held-out files)")
    parser.add_argument("--max-tokens", type=int, help="tokens of the text to use (default: all)")
    parser.add_argument("--window", type=int, help=f"default: the model's length, {MAX_WINDOW} at most")
    parser.add_argument("--chunk", type=int, default=512, help="tokens a step (default: 512)")
    tables.add_json_flag(parser)
    return parser.parse_checked(lambda args: tables.check_target("--json", args.json), max_tokens=1, window=1, chunk=1)


def load_model(args: argparse.Namespace) -> tuple[Model, tuple[torch.dtype, ...]]:
    """The model, and the dtype of each layer's cache. ``ValueError`` for what the engine would refuse."""
    cache = {"kv_cache_dtype": args.kv_cache_dtype, "kv_cache_skip_layers": args.skip_layers}
    engine_config = EngineConfig(dtype=args.dtype, device=args.device, **cache)
    config, device = read_config(args.model), resolve_device(args.device)
    dtype = getattr(torch, config.dtype if args.dtype == "auto" else args.dtype)
    dtypes = layer_dtypes(engine_config, dtype, config)
    if not quantised_layers(config, args.skip_layers):
        raise ValueError("--skip-layers must leave a layer to quantise, given all of them")
    if device.type == "cuda":
        for cache_dtype in dtypes:
            kv_quant.check_capability(cache_dtype, torch.cuda.get_device_capability(device))
    return Model(config, loader.load_weights(args.model, config, dtype, device), dtype, device), dtypes


def quantised_layers(config: ModelConfig, skipped: Sequence[int]) -> list[int]:
    """The layers that have a cache of their own, without those ``skipped``."""
    specs = family_of(config).layers(config)
    return [layer for layer, spec in enumerate(specs) if spec.shares_cache_of is None and layer not in skipped]


def read_windows(args: argparse.Namespace, model: Model) -> tuple[str, list[Window]]:
    """What the text is, and its windows."""
    longest = model.config.max_position_embeddings
    length = args.window or min(longest, MAX_WINDOW)
    if length > longest:
        raise ValueError(f"--window must be at most the model's length, {longest}, given {length}")
    texts = {str(args.text): args.text.read_text(encoding="utf-8")} if args.text else held_out_texts()
    tokenizer = Tokenizer(args.model)
    windows = cut_windows([tokenizer.encode(text) for text in texts.values()], length, args.max_tokens, model.device)
    name = str(args.text) if args.text else f"{len(texts)} files of the standard library held out from the demo model"
    return name, windows


def main() -> int:
    args = parse_arguments()
    with errors_end("kv_report"):
        model, dtypes = load_model(args)
        text, windows = read_windows(args, model)

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
        layer: {"attention_error": comparison.attention_errors[layer], **summary(comparison)}
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
