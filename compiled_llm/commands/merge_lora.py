"""Write a checkpoint with a LoRA adapter merged into its weights.

    compiled-llm merge-lora MODEL ADAPTER OUT

OUT is a directory of its own, which any engine serves and transformers loads, with the model's tokenizer. Each weight
that the adapter changes is W + scale B A, computed in float32 and rounded once to its dtype. OUT appears when it is
whole. Quantised models are refused, and adapters that change more than linear layers. See docs/lora.md.

Exit status: 0, 2 where an argument does not allow it, 128 + the signal's number after SIGINT (130) or SIGTERM (143).
"""

import os
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import as_program


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Write a checkpoint with a LoRA adapter merged into its weights.")
    made.add_argument("model", metavar="MODEL", help="the adapter's base model: a directory, or an id of the hub")
    made.add_argument("adapter", type=Path, metavar="ADAPTER", help="a directory as PEFT's save_pretrained writes it")
    made.add_argument("out", type=Path, metavar="OUT", help="a new or empty directory")
    return made


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_args(arguments)
    with errors_end(program):
        from compiled_llm.adapters.merging import merge_adapter  # it loads torch, which takes seconds
        from compiled_llm.api.config import EngineConfig
        from compiled_llm.checkpoint.model_files import checkpoint_directory

        merged = merge_adapter(checkpoint_directory(EngineConfig(model=args.model)), args.adapter, args.out)
    where = os.path.relpath(args.out)
    stdout.write(f"{where}: {merged.num_layers} layers merged, {merged.nbytes / 1e6:.1f} MB of tensors\n")
    return 0
