"""Report what quantised weights cost in quality, and save in memory and time, for one model on one text.

    python scripts/weights_report.py --quantization int8,int4
    python scripts/weights_report.py --model DIR --quantization int4 --quantization-skip layers.0 --text FILE
    python scripts/weights_report.py --model DIR --quantized-model DIR --text FILE --kv-cache-dtype int8

The weights are rounded at load, as the engine's arguments of the same names say, or read from a quantised checkpoint of
the same model, ``--quantized-model``. The text is teacher-forced, as in ``kv_report.py``: the model runs over it twice
in lock-step, uncompiled, once as it is and once quantised. Measured are

- the KL divergence of the next-token distributions, D(own dtype || quantised), in nats, for every token;
- the perplexity of both, and how often their likeliest tokens agree;
- for each decoder layer, and for the head and the embedding where they are quantised, with that one alone quantised:
  the KL divergence that it causes, and the error of its output, the Euclidean norm over all tokens of the difference
  to the output without quantisation, relative to that output's. The output of a decoder layer is the hidden state
  after it, that of the head are the logits. The KV cache is in the model's dtype then;
- bytes of the weights: of all tensors as they are kept, and of linear layers without padding;
- the speed of one stream, tokens a second of a prompt and of a decode, by compiled engines that take turns.

A layer is worth keeping in the model's dtype if it causes more than twice the mean KL divergence. In half
precision, values that round the other way cost a divergence of their own; ``--dtype float32`` shows that of the
quantisation alone.

Ends in one JSON line. Exit status: 0, 1 when a scale of the KV cache is zero or not finite, 2 for bad arguments.
"""

import argparse
import functools
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bench.own_checkout
import torch
from bench import tables
from teacher_forcing import (
    BadScaleError,
    Model,
    Run,
    Window,
    add_text_flags,
    cache_dtypes,
    compare,
    load_model,
    read_windows,
    run_chunk,
    step_input,
    summary,
    worth_keeping,
)
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.config import QUANTISED_DTYPES, QUANTIZATIONS, EngineConfig
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.inputs import KVCache
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.linears.quantized import Joined, Quantized, QuantizedExperts
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import linear_layers, tensors
from compiled_llm.step.kv_cache import describe, dtype_name
from compiled_llm.system import hardware as machine

ROUNDS = 5  # of each engine, for its speed
FLAGS = ("quantization_group_size", "quantization_skip", "quantization_head", "quantization_embedding")
KEPT_BY = {"head": "--quantization-head none", "embedding": "--quantization-embedding none"}


class QuantisedPart(NamedTuple):
    """Something of a model that is quantised: its name, the weights with it alone quantised, a run for its output."""

    name: str
    weights: Any
    run: Run


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, metavar="DIR", help="default: the bundled demo model")
    kinds = f"one or several of {', '.join(QUANTIZATIONS)}"
    parser.add_argument("--quantization", type=lambda text: text.split(","), metavar="KIND[,KIND...]", help=kinds)
    parser.add_argument(
        "--quantized-model", type=Path, metavar="DIR", help="the same model, as quantised and published"
    )
    sizes = "of int4 and int4_w4a8: 32, 64 or 128"
    parser.add_argument("--quantization-group-size", type=int, metavar="INT", help=sizes)
    parser.add_argument("--quantization-skip", action="append", default=[], metavar="NAME", help="not quantised")
    parser.add_argument("--quantization-head", default="auto", metavar="KIND", help="auto, none or a kind")
    parser.add_argument("--quantization-embedding", default="none", metavar="KIND", help="none or a kind")
    parser.add_argument("--no-layers", action="store_true", help="measure all together, and no layer alone")
    parser.add_argument("--kv-cache-dtype", choices=("auto", *QUANTISED_DTYPES), default="auto")
    dtypes = "of the model: auto (the checkpoint's), float32, bfloat16, float16"
    parser.add_argument("--dtype", default="auto", help=dtypes)
    parser.add_argument("--device", default="auto")
    least = add_text_flags(parser)
    tokens = "tokens to generate for the speed (default: 64); 0: no speed"
    parser.add_argument("--speed-tokens", type=int, default=64, metavar="INT", help=tokens)
    prompt = "tokens of the prompt for the speed (default: 512, or what the model's length leaves)"
    parser.add_argument("--speed-prompt", type=int, default=512, metavar="INT", help=prompt)
    parser.add_argument("--enforce-eager", action="store_true", help="engines that do not compile")
    tables.add_json_flag(parser)
    return parser.parse_checked(check_arguments, **least, speed_tokens=0, speed_prompt=1)


def check_arguments(args: argparse.Namespace) -> None:
    """``ValueError`` for bad arguments; checked before a model is loaded."""
    tables.check_target("--json", args.json)
    if (args.quantization is None) == (args.quantized_model is None):
        raise ValueError("give either --quantization KIND[,KIND...] or --quantized-model DIR")
    if args.speed_tokens == 1:
        raise ValueError("--speed-tokens must be at least 2, or 0 for no speed, given 1")
    quantised_arguments(args)


def has_groups(arguments: dict[str, Any]) -> bool:
    """Whether weights are rounded in groups whose size may be chosen."""
    names = ("quantization", "quantization_head", "quantization_embedding")
    return any(arguments[name].startswith("int4") for name in names)


def quantised_arguments(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is compared -> arguments of its engine. ``ValueError`` for what the engine would refuse."""
    common = {"dtype": args.dtype, "device": args.device, "kv_cache_dtype": args.kv_cache_dtype}
    given = {name: getattr(args, name) for name in FLAGS}
    if args.quantized_model is not None:
        named = {os.path.relpath(args.quantized_model): {**given, **common, "model": str(args.quantized_model)}}
    else:
        weights = {**given, **common, "model": str(args.model)}
        named = {kind: {**weights, "quantization": kind} for kind in args.quantization}
        in_groups = [kind for kind, arguments in named.items() if has_groups(arguments)]
        for kind in named.keys() - in_groups if in_groups else ():  # the size is not for these
            named[kind]["quantization_group_size"] = None
    for arguments in named.values():
        EngineConfig(**arguments)
    return named


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
    own: Model, other: Model, dtypes: Sequence[torch.dtype], windows: list[Window], args: argparse.Namespace, title: str
) -> dict[str, Any]:
    """Of all that is quantised together, and of each part alone unless the flags say not."""
    parts = list(quantised_parts(own, other))
    if not parts:
        raise ValueError(f"{title}: no layer is quantised")
    result: dict[str, Any] = {**sizes_of(other.weights)}
    result |= summary(compare(own, other, dtypes, windows, args.chunk, title))
    if args.no_layers:
        return result
    alone: dict[str, dict[str, float]] = {}
    for part in parts:
        one = own._replace(weights=part.weights)
        comparison = compare(
            own, one, [own.dtype] * len(dtypes), windows, args.chunk, f"{title}, {part.name}", part.run
        )
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


def speeds(args: argparse.Namespace, own: dict[str, Any], named: dict[str, dict], prompt: list[int]) -> dict[str, dict]:
    """The speed of each beside the model in its own dtype; two engines at a time."""
    length = len(prompt) + args.speed_tokens
    common = {"max_model_len": length, "bucket_sizes": (1,), "num_kv_blocks": 2 + length // 16, "progress": "off"}
    common |= {"enable_prefix_caching": False, "enforce_eager": args.enforce_eager}
    found, own_engine = {}, CompiledEngine(**own, **common)
    for name, arguments in named.items():
        engine = CompiledEngine(**arguments, **common)
        found[name] = speed({"own": own_engine, "quantised": engine}, prompt, args.speed_tokens)
        engine.close()
    own_engine.close()
    return found


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], torch.device]:
    """The JSON line without the machine, and the device."""
    named = quantised_arguments(args)
    own_arguments = {"model": str(args.model), "dtype": args.dtype, "device": args.device}
    own = load_model(EngineConfig(**own_arguments), args.model)
    text, windows = read_windows(args, own.config, own.device)
    kinds: dict[str, dict[str, Any]] = {}
    for name, arguments in named.items():
        arguments["dtype"] = dtype_name(own.dtype)
        config = EngineConfig(**arguments)
        other = load_model(config, Path(arguments["model"]))
        check_alike(own.config, other.config)
        dtypes = cache_dtypes(other, config)
        kinds[name] = quality(own, other, dtypes, windows, args, name)
        cache = describe(other.config, dtypes, other.dtype)
        del other
    result = {"report": "weights", "model": os.path.relpath(args.model), "dtype": dtype_name(own.dtype), "text": text}
    result |= {"windows": len(windows), "chunk": args.chunk, "kv_cache_dtype": args.kv_cache_dtype, "kv_cache": cache}
    result |= {name: getattr(args, name) for name in FLAGS} | sizes_of(own.weights) | {"kinds": kinds}
    if args.speed_tokens:
        longest = min(args.speed_prompt, own.config.max_position_embeddings - args.speed_tokens)
        if longest < 1:
            raise ValueError(
                f"--speed-tokens must be below the model's length, {own.config.max_position_embeddings}, given "
                f"{args.speed_tokens}"
            )
        prompt = torch.cat([window.token_ids for window in windows])[:longest].tolist()
        device = own.device
        del own
        for name, rates in speeds(args, own_arguments, named, prompt).items():
            kinds[name]["speed"] = rates
        return result, device
    return result, own.device


def print_kinds(result: dict[str, Any]) -> None:
    """A line for each kind."""
    rows = []
    for name, found in result["kinds"].items():
        row = {"weights": name, "perplexity": f"{found['perplexity_quantised']:.4f}"}
        row |= {"change": f"{found['perplexity_change']:+.3%}", "KL mean": found["kl_mean"], "KL p99": found["kl_p99"]}
        row["top-1 the same"] = f"{found['top1_agreement']:.2%}"
        row["bytes"] = f"{found['weight_bytes'] / result['weight_bytes']:.1%}"
        if "speed" in found:
            rates = found["speed"]
            row |= {f"{what}, tokens/s": f"{rates[what]['quantised']:.0f}" for what in ("prefill", "decode")}
            row |= {f"{what}, times": f"{rates[f'{what}_ratio']:.2f}" for what in ("prefill", "decode")}
        rows.append(row)
    print("\n" + tables.text_table(rows))


def print_layers(name: str, found: dict[str, Any], own: str) -> None:
    """What each layer causes, and which to leave out."""
    total = sum(figures["kl_mean"] for figures in found["layers"].values()) or 1.0
    rows = [
        {f"{name}, alone": part, "output error": f"{figures['output_error']:.3%}", "KL mean": figures["kl_mean"]}
        | {"share": f"{figures['kl_mean'] / total:.1%}", "KL p99": figures["kl_p99"]}
        for part, figures in found["layers"].items()
    ]
    print("\n" + tables.text_table(rows))
    keep = found["worth_keeping"]
    some = f"Worth keeping in {own}, as each causes more than twice the mean KL:"
    none = f"None is worth keeping in {own}: none causes more than twice the mean KL. The first to keep is"
    print(some if keep else none)
    flags = (KEPT_BY.get(part, f"--quantization-skip {part}") for part in keep or found["ranking"][:1])
    print(f"  {' '.join(flags)}")


def main() -> int:
    args = parse_arguments()
    with errors_end("weights_report"), errors_end("weights_report", (BadScaleError,), 1):
        result, device = measure(args)
    own, first = result["dtype"], next(iter(result["kinds"].values()))
    rows = {
        "model": f"{result['model']}, {own} on {device}",
        "text": f"{result['text']}: {first['tokens']} tokens, {result['windows']} windows, {args.chunk} tokens a step",
        "KV cache, quantised": result["kv_cache"],
        f"weights in {own}": f"{result['weight_bytes'] / 1e6:.1f} MB",
        f"perplexity in {own}": f"{first['perplexity']:.4f}",
    }
    if "speed" in first:
        rates = first["speed"]
        rows["speed, one stream"] = (
            f"{rates['prefill']['own']:.0f} tokens/s of a prompt of {rates['prompt_tokens']}, "
            f"{rates['decode']['own']:.0f} tokens/s of {rates['output_tokens']} after it"
        )
    tables.print_table("Weights, quantised", rows)
    print_kinds(result)
    for name, found in result["kinds"].items():
        if "layers" in found:
            print_layers(name, found, own)
    tables.finish({**result, "machine": machine.describe(device)}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
