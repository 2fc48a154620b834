"""Measure the engine, its parts, and other engines beside it: a file of ``compiled_llm/bench/`` for each name."""

import sys
from collections.abc import Sequence

from compiled_llm.api.command_line import FlagParser
from compiled_llm.commands import module_of

# Name -> what it measures. Those that serve requests come first, with the flags of ``vllm bench``.
BENCHES = {
    "latency": "one batch of requests from start to end; also transformers.generate",
    "throughput": "many requests at once; also transformers.generate",
    "serve": "a server over HTTP, this one or another: TTFT, TPOT, goodput under load",
    "servers": "this server and vLLM's under the same load, in turns",
    "arrivals": "the same load on an engine without a server",
    "peers": "the same requests through vLLM, OpenVINO, llama.cpp and transformers",
    "settings": "several precisions or engine arguments, in turns",
    "step-costs": "what steps take here, for compiled-llm plan",
    "plan": "requests served here, beside the same simulated by compiled-llm plan",
    "shared": "what an engine keeps of its speed on a machine that others use",
    "start": "starts, cold and warm, stage by stage",
    "loading": "the reading of weights, beside a plain read of their files",
    "host": "the host's time of a step by part, and how long a GPU idles",
    "speculation": "tokens a second with drafts by each method, and without",
    "lora": "tokens a second with adapters, many, one and none",
    "tiers": "a known prompt's first token from host memory and files, beside computing it",
    "roles": "an engine for prompts and one for decodes, beside one for both",
    "sampling": "each kind of sampling, beside a decode step",
    "kernels": "every kernel of a decode step on a GPU, and the gaps",
    "attention": "paged attention, beside SDPA, FlexAttention and the machine's limits",
    "products": "linear layers and experts, beside other ways to compute them",
    "all-reduce": "the sum over ranks, beside gloo",
    "gpt-fast": "a token of gpt-fast, to compare a GPU's decode with",
}


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Measure the engine, its parts, and other engines beside it.")
    made.add_argument("benchmark", choices=BENCHES, metavar="NAME", help="one of these; NAME --help shows its flags")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the first argument names; returns the exit status."""
    name, *flags = list(sys.argv[2:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help", "--help=all"):
        print(f"usage: {program} NAME [FLAG ...]\n")
        print("\n".join(f"  {name:12}{text}" for name, text in BENCHES.items()))
        print(f"\n{program} NAME --help shows the flags of a benchmark.")
        return 0
    if name not in BENCHES:
        parser(program).parse_args([name])  # which ends the program
    return module_of("compiled_llm.bench", name).main(f"{program} {name}", flags)  # the file loads torch
