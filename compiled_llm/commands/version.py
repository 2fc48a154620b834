"""Print versions, processor, GPU and the directory of what was compiled: what a report of a fault should begin with.

    compiled-llm version

Exit status: 0, or 2 for bad arguments.
"""

from collections.abc import Sequence

from compiled_llm.api.command_line import FlagParser


def parser(program: str) -> FlagParser:
    return FlagParser(
        prog=program, description="Print versions, processor, GPU and the directory of what was compiled."
    )


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser(program).parse_args(arguments)
    import torch  # which takes a second

    from compiled_llm.api.version import __version__
    from compiled_llm.ops import native
    from compiled_llm.system.hardware import describe
    from compiled_llm.system.resources import granted_cores, total_memory

    facts = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = "none"
    if "gpu" in facts:
        gpu = f"{facts['gpu']}, {facts['gpu_sms']} SMs, {facts['gpu_bytes'] / 2**30:.1f} GiB, CUDA {facts['cuda']}"
    cpu = f"{facts['cpu']}, {granted_cores()} cores, {total_memory() / 2**30:.1f} GiB"
    rows = {
        "compiled-llm": __version__,
        "torch": facts["torch"],
        "triton": facts.get("triton", "not installed"),
        "transformers": facts["transformers"],
        "python": facts["python"],
        "CPU": cpu,
        "instruction set": native.best_isa() or "plain torch: there is no C++ compiler, or none of its own",
        "C++ compiler": native.compiler() or "none",
        "GPU": gpu,
        "cache": str(native.cache_directory()),
    }
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:{width}}  {text}")
    return 0
