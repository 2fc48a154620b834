"""Quantise a checkpoint, and write it in the layout of compressed-tensors, which vLLM and transformers load too.

    compiled-llm quantize --output DIR --method gptq --kind int4 --group-size 32
    compiled-llm quantize --model DIR --output DIR --method smoothquant --kind int8_w8a8 --text FILE

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

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, errors_end
from compiled_llm.api.config import QUANTIZATIONS, EngineConfig
from compiled_llm.quantizing import METHODS

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from compiled_llm.quantizing.quantize import Report

_MOST_WINDOW = 2048


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Quantise a checkpoint; vLLM and transformers load the result too.")
    add = made.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="new or empty")
    add("--method", choices=METHODS, required=True, help="how weights are rounded")
    add("--kind", choices=QUANTIZATIONS, required=True, help="what they are rounded to")
    add("--group-size", type=int, metavar="N", help="of int4 and int4_w4a8 (default: 128)")
    add("--zeros", action="store_true", help="zero points, with int4")
    add("--alpha", type=float, help="of smoothquant (default: searched for each group of layers)")
    add("--no-act-order", action="store_true", help="gptq: columns in their order")
    few = "round experts to nearest that saw fewer in --text (default: 128)"
    add("--least-tokens", type=int, default=128, metavar="N", help=few)
    add("--skip", nargs="+", default=[], metavar="NAME", help="layers whose names have one of these")
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="to calibrate on, UTF-8 (default: Python's library, for the demo model)",
    )
    add("--max-tokens", type=int, default=65536, metavar="N", help="of --text (default: 65536)")
    add("--eval-text", type=Path, metavar="FILE", help="to evaluate on (default: the demo model's held-out files)")
    add(
        "--eval-max-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="of --eval-text; 0: no evaluation (default: 32768)",
    )
    add("--window", type=int, metavar="N", help=f"tokens at once (default: the model's length, {_MOST_WINDOW} at most)")
    tables.add_json_flag(made)
    add_engine_arguments(made, "model")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(
        arguments=arguments, max_tokens=2, least_tokens=1, eval_max_tokens=0, window=2
    )  # fmt: skip
    started = time.perf_counter()
    # Read when torch is imported. Beside other work threads that spin while they wait take three to six times as long;
    # on a machine with nothing else to do those that do not spin take 13 to 20% more.
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from compiled_llm.checkpoint.model_files import DEMO_MODEL, checkpoint_directory
    from compiled_llm.quantizing.block_quantizer import Settings
    from compiled_llm.quantizing.blocks import BlockModel
    from compiled_llm.quantizing.quantize import in_short, quantize
    from compiled_llm.quantizing.schemes import make_scheme
    from compiled_llm.quantizing.texts import Text

    with errors_end(program):
        engine = EngineConfig(model=args.model)
        directory = checkpoint_directory(engine)
        model = BlockModel(directory)
        scheme = make_scheme(args.kind, args.group_size, args.zeros, model.dtype)
        skip = tuple(args.skip)
        settings = Settings(args.method, scheme, args.alpha, not args.no_act_order, skip, args.least_tokens)
        has_text = args.text is not None or directory == DEMO_MODEL
        if not has_text and args.method != "rtn":
            raise ValueError(f"--method {args.method} is calibrated on a text: give --text FILE")
        calibration = Text(args.text, args.max_tokens, args.window, _MOST_WINDOW, learned=True)
        evaluation = Text(args.eval_text, args.eval_max_tokens, args.window, _MOST_WINDOW)
        found = quantize(
            engine,
            model,
            args.output,
            settings,
            calibration if has_text else None,
            evaluation if args.eval_max_tokens else None,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    done = found.result
    print(tables.text_table(in_short(done.layers)))
    calibrated = f"{args.method}, {args.kind}, calibrated on {found.calibrated_tokens} tokens"
    rows = {"model": os.path.relpath(directory), "method": calibrated}
    tables.print_table("Quantised", rows | _rows_of(found, args.output, args.least_tokens))
    result = {"report": "quantize", "model": rows["model"], "method": args.method, "kind": args.kind}
    result |= {"group_size": scheme.form.group_size, "zeros": args.zeros, "bytes": done.nbytes, **found.quality}
    result |= {"ignored": done.ignored, "rounded": done.rounded, "layers": done.layers}
    tables.finish(result | {"seconds": time.perf_counter() - started}, args.json)
    return 0


def _rows_of(found: "Report", output: Path, least_tokens: int) -> dict[str, str]:
    """What was written, and what it is worth."""
    done, quality = found.result, found.quality
    written = f"{os.path.relpath(output)}, {done.nbytes / 1e6:.1f} MB of tensors, {len(done.layers)} layers"
    rows = {"written": written}
    if done.rounded:
        few = f"{len(done.rounded)} layers of experts that saw fewer than {least_tokens} tokens"
        rows["rounded to nearest"] = f"{few}, such as {done.rounded[0]}; give more --max-tokens"
    if quality:
        before, after, change = (quality[f"perplexity{name}"] for name in ("", "_quantised", "_change"))
        rows["perplexity"] = f"{before:.4f} -> {after:.4f} ({change:+.3%}), {quality['tokens']} tokens"
        rows["KL divergence"] = f"mean {quality['kl_mean']:.3g} nats; top-1 agreement {quality['top1_agreement']:.2%}"
    return rows
