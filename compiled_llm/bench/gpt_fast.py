"""gpt-fast's model on one stream: milliseconds of a decoded token, to compare a GPU's decode of this engine with.

    git clone https://github.com/pytorch-labs/gpt-fast
    compiled-llm bench gpt-fast --checkout gpt-fast --shape llama-3-8b --context 1024

Its ``model.py`` with random weights in bfloat16 decodes greedily behind ``--context`` tokens of random keys and values,
compiled as its ``generate.py`` does (mode "reduce-overhead", fullgraph, coordinate descent tuning); the token of a step
is the next one's input. ``--attention``: "math" as in its ``generate.py``, where Inductor generates the attention, or
"cudnn". The figure is the median of ``--repeats`` runs of ``--tokens``. The last line is JSON.

Exit status: 0, or 2 for bad arguments.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench.harness import finish, has_gpu
from compiled_llm.bench.program_turns import wait_for_turn

# Those of mode "reduce-overhead", and the tuning that gpt-fast switches on.
_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": True,
    "coordinate_descent_tuning": True,
    "triton.unique_kernel_names": True,
}
_ATTENTION = {"math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION}


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="gpt-fast's model on one stream: milliseconds of a decoded token.")
    made.add_argument("--checkout", type=Path, required=True, metavar="DIR", help="with gpt-fast's model.py")
    made.add_argument("--shape", default="llama-3-8b", help="of its transformer_configs (default: llama-3-8b)")
    made.add_argument("--attention", choices=_ATTENTION, default="math", help="(default: math)")
    made.add_argument("--context", type=int, default=1024, help="tokens before (default: 1024)")
    made.add_argument("--tokens", type=int, default=128, help="of a run (default: 128)")
    made.add_argument("--repeats", type=int, default=5, help="runs, of which the median is taken (default: 5)")
    made.add_argument("--device", default="cuda", help="(default: cuda)")
    made.add_argument("--eager", action="store_true", help="compile nothing")
    tables.add_json_flag(made)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    if not (args.checkout / "model.py").is_file():
        raise ValueError(f"--checkout must be a folder with gpt-fast's model.py, given {args.checkout}")


def load(args: argparse.Namespace) -> Any:
    """The model with random weights and a cache of random keys and values, in bfloat16."""
    sys.path.insert(0, str(args.checkout.resolve()))
    module = importlib.import_module("model")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = module.Transformer.from_name(args.shape)
    model = model.to(torch.bfloat16).to_empty(device=args.device).eval()
    with torch.device(args.device):
        model.setup_caches(max_batch_size=1, max_seq_length=args.context + args.tokens)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02)
    return model


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(check_arguments, arguments, context=1, tokens=1, repeats=1)
    if not has_gpu(program, args.device):
        return 2
    with torch.no_grad(), sdpa_kernel(_ATTENTION[args.attention]):
        model = load(args)

        def next_token(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return model(token, position)[:, -1].argmax(-1, keepdim=True)

        step = next_token if args.eager else torch.compile(next_token, options=_OPTIONS, fullgraph=True)

        def run() -> float:
            """Seconds of a token."""
            token = torch.zeros(1, 1, dtype=torch.int64, device=args.device)
            position = torch.tensor([args.context], device=args.device)
            if args.device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(args.tokens):
                token = step(token, position).clone()
                position += 1
            token.tolist()
            return (time.perf_counter() - started) / args.tokens

        run()  # compiles, and records the graph
        wait_for_turn()
        run()
        times = [run() * 1e3 for _ in range(args.repeats)]
        size = sum(one.nbytes for one in model.parameters()) - model.tok_embeddings.weight.nbytes
    token_ms = statistics.median(times)
    result: dict[str, Any] = {"shape": args.shape, "attention": args.attention, "context": args.context}
    result |= {"tokens": args.tokens, "token_ms": token_ms, "token_ms_of_each": times}
    print(f"gpt-fast, {args.shape}, {args.attention}: {token_ms:.3f} ms a token behind {args.context} tokens")
    finish("gpt-fast", result | {"weights_gb_per_s": size / token_ms / 1e6}, args.json, device=args.device)
    return 0
