"""Quantise a checkpoint, and write it in the layout of compressed-tensors, which vLLM and transformers load too.

    python scripts/quantize_model.py --output DIR --method gptq --kind int4 --group-size 32
    python scripts/quantize_model.py --model DIR --output DIR --method smoothquant --kind int8_w8a8 --text FILE

Methods: rtn (rounding to nearest), smoothquant (kinds that quantise inputs), awq (scales and clipping searched), gptq
(error feedback), and smoothquant+gptq and awq+gptq (scales first, then error feedback). All but rtn are calibrated on
``--text``; for the demo model, that is by default files of Python's standard library other than those that are held
out. Linear layers of the decoder blocks are quantised, the head and the embedding are not. One block is in memory at a
time, in float32. Experts go by the tokens that are routed to them; those with fewer than ``--least-tokens`` are rounded
to nearest, which the report says.

The report has, for each layer, the relative error of its outputs over calibration tokens: as quantised, with rounding
to nearest, and of int8 with LLM.int8()'s split of outlier columns, with how many columns that would leave. Perplexity
before and after, the KL divergence and the agreement of the likeliest tokens are of ``--eval-text``, by default the
demo model's held-out files.

Ends in one JSON line. Exit status: 0, or 2 for bad arguments.
"""

import argparse
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import bench.own_checkout
import torch
import torch.nn.functional as F
from bench import tables
from teacher_forcing import cut_windows, held_out_texts
from torch import Tensor

from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.quantizing.block_quantizer import METHODS, Settings
from compiled_llm.quantizing.blocks import BlockModel
from compiled_llm.quantizing.model_quantizer import Windows, quantize_checkpoint
from compiled_llm.quantizing.schemes import KINDS, make_scheme
from compiled_llm.quantizing.writing import CheckpointWriter
from compiled_llm.text.tokenizer import Tokenizer

MAX_WINDOW = 2048


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, metavar="DIR", help="default: the bundled demo model")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--group-size", type=int, help="of int4 and int4_w4a8 (default: 128)")
    parser.add_argument("--zeros", action="store_true", help="zero points, with int4")
    parser.add_argument("--alpha", type=float, help="of smoothquant (default: searched for each group of layers)")
    parser.add_argument("--no-act-order", action="store_true", help="gptq: columns in their order")
    few = "an expert that saw fewer in --text is rounded to nearest (default: 128)"
    parser.add_argument("--least-tokens", type=int, default=128, help=few)
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="layers whose names have one of these")
    parser.add_argument("--text", type=Path, metavar="FILE", help="to calibrate on, UTF-8")
    parser.add_argument("--max-tokens", type=int, default=65536, help="of it (default: 65536)")
    parser.add_argument("--eval-text", type=Path, metavar="FILE", help="default: the demo model's held-out files")
    parser.add_argument("--eval-max-tokens", type=int, default=32768, help="of it; 0: no evaluation (default: 32768)")
    parser.add_argument("--window", type=int, help=f"default: the model's length, {MAX_WINDOW} at most")
    tables.add_json_flag(parser)
    least = {"max_tokens": 2, "least_tokens": 1, "eval_max_tokens": 0, "window": 2}
    return parser.parse_checked(lambda args: tables.check_target("--json", args.json), **least)


def calibration_texts(args: argparse.Namespace) -> list[str]:
    """``ValueError`` where a method needs a text that is not given."""
    if args.text is not None:
        return [args.text.read_text(encoding="utf-8")]
    if args.model == DEMO_MODEL:
        from train_demo_model import read_source_files, split_files

        return list(split_files(read_source_files(200))[0].values())
    if args.method != "rtn":
        raise ValueError(f"--method {args.method} is calibrated on a text: give --text FILE")
    return []


def windows_of(model: BlockModel, args: argparse.Namespace, texts: list[str], max_tokens: int) -> list[Tensor]:
    """Windows of token ids of the first ``max_tokens`` tokens, with the token after each window at its end."""
    longest = model.config.max_position_embeddings
    length = args.window or min(longest, MAX_WINDOW)
    if length > longest:
        raise ValueError(f"--window must be at most the model's length, {longest}, given {length}")
    tokenizer = Tokenizer(args.model)
    documents, count = [], 0
    for text in texts:
        documents.append(tokenizer.encode(text))
        count += len(documents[-1])
        if count > max_tokens:
            break
    cut = cut_windows(documents, length - 1, max_tokens, torch.device("cpu")) if documents else []
    return [torch.cat([window.token_ids, window.targets[-1:]]) for window in cut]


def quality(model: BlockModel, ids: list[Tensor], before: Windows, after: Windows) -> dict[str, float]:
    """Of the quantised model beside the model as it was."""
    losses, kl, agreed, count = torch.zeros(2, dtype=torch.float64), 0.0, 0, 0
    for tokens, *hidden in zip(ids, before.hidden, after.hidden, strict=True):
        own, other = (model.logits(x)[:-1].double().log_softmax(-1) for x in hidden)
        targets = tokens[1:].long()
        losses += torch.stack([F.nll_loss(p, targets, reduction="sum") for p in (own, other)])
        kl += float(F.kl_div(other, own, reduction="sum", log_target=True))
        agreed += int((own.argmax(-1) == other.argmax(-1)).sum())
        count += len(targets)
    own_loss, loss = (losses / count).tolist()
    return {
        "tokens": count,
        "perplexity": math.exp(own_loss),
        "perplexity_quantised": math.exp(loss),
        "perplexity_change": math.exp(loss - own_loss) - 1,
        "kl_mean": kl / count,
        "top1_agreement": agreed / count,
    }


def in_short(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table: a layer each, but for all experts' together the mean of each number."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        groups.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.*.", layer["name"]), []).append(layer)
    rows: list[dict[str, Any]] = []
    for name, group in groups.items():
        numbers = {key: [layer[key] for layer in group if key in layer] for layer in group for key in layer}
        mean = {key: sum(values) / len(values) for key, values in numbers.items() if key != "name"}
        rows.append(group[0] if len(group) == 1 else {"name": name, **mean})
    return rows


def main() -> int:
    args = parse_arguments()
    started = time.perf_counter()
    with errors_end("quantize_model"):
        model = BlockModel(args.model)
        scheme = make_scheme(args.kind, args.group_size, args.zeros, model.dtype)
        skip = tuple(args.skip)
        settings = Settings(args.method, scheme, args.alpha, not args.no_act_order, skip, args.least_tokens)
        text = Windows(*model.embed(windows_of(model, args, calibration_texts(args), args.max_tokens)))
        held_out = [args.eval_text.read_text(encoding="utf-8")] if args.eval_text else list(held_out_texts().values())
        eval_ids = windows_of(model, args, held_out, args.eval_max_tokens) if args.eval_max_tokens else []
        hidden, calls = model.embed(eval_ids)
        evaluated = (Windows(hidden, calls), Windows(list(hidden), calls)) if eval_ids else ()
        writer = CheckpointWriter(args.model, args.output)
        done = quantize_checkpoint(
            model, writer, settings, text, evaluated, lambda line: print(line, file=sys.stderr, flush=True)
        )
    found = quality(model, eval_ids, *evaluated) if evaluated else {}
    print(tables.text_table(in_short(done.layers)))
    rows = {
        "model": os.path.relpath(args.model),
        "written": f"{os.path.relpath(args.output)}, {done.nbytes / 1e6:.1f} MB of tensors, {len(done.layers)} layers",
        "method": f"{args.method}, {args.kind}, calibrated on {sum(x.shape[1] for x in text.hidden)} tokens",
    }
    if done.rounded:
        few = f"{len(done.rounded)} layers of experts that saw fewer than {args.least_tokens} tokens"
        rows["rounded to nearest"] = f"{few}, such as {done.rounded[0]}; give more --max-tokens"
    if found:
        before, after, change = (found[f"perplexity{name}"] for name in ("", "_quantised", "_change"))
        rows["perplexity"] = f"{before:.4f} -> {after:.4f} ({change:+.3%}), {found['tokens']} tokens"
        rows["KL divergence"] = f"mean {found['kl_mean']:.3g} nats; top-1 agreement {found['top1_agreement']:.2%}"
    tables.print_table("Quantised", rows)
    result: dict[str, Any] = {"report": "quantize_model", "model": rows["model"], "method": args.method}
    result |= {"kind": args.kind, "group_size": scheme.form.group_size, "zeros": args.zeros, "bytes": done.nbytes}
    result |= {
        **found,
        "ignored": done.ignored,
        "rounded": done.rounded,
        "seconds": time.perf_counter() - started,
        "layers": done.layers,
    }
    tables.finish(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
