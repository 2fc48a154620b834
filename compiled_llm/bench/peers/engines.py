"""Which engines the flags name, and how each gets the model: what ``compare.py`` and ``check.py`` share."""

import argparse
import json
from pathlib import Path
from typing import Any, Protocol

from compiled_llm.bench.peers import checkpoints
from compiled_llm.bench.peers import processes as peers
from compiled_llm.bench.peers.checkpoints import ConversionFailed
from compiled_llm.bench.peers.precisions import Precision
from compiled_llm.bench.peers.processes import Peer, PeerFailed
from compiled_llm.system.resources import granted_cores


class Engines(Protocol):
    """Who is given the engines, one after another."""

    def start(self, peer: Peer) -> None: ...

    def fail(self, name: str, error: PeerFailed | ConversionFailed) -> None: ...


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    cores = granted_cores()
    parser.add_argument("--vllm-python", metavar="PATH", help="python of an environment with vLLM for CPUs")
    parser.add_argument("--openvino-python", metavar="PATH", help="the same with openvino-genai and optimum-intel")
    parser.add_argument("--llama-python", metavar="PATH", help="the same with llama-cpp-python and gguf")
    like = "of every engine's weights; int8 and int4 of activations too where an engine can (default: bf16)"
    parser.add_argument("--precision", choices=("bf16", "int8", "int4"), default="bf16", help=like)
    sizes = "inputs that share a scale in int4; llama.cpp's are always 32 (default: 32)"
    parser.add_argument("--group-size", type=int, choices=(32, 128), default=32, help=sizes)
    parser.add_argument("--engine-args", type=json_object, default={}, metavar="JSON", help=f"on {peers.ENGINE}")
    parser.add_argument("--vllm-args", type=json_object, default={}, metavar="JSON", help=f"on {peers.VLLM}")
    parser.add_argument("--openvino-args", type=json_object, default={}, metavar="JSON", help=f"on {peers.OPENVINO}")
    parser.add_argument("--llama-args", type=json_object, default={}, metavar="JSON", help=f"on {peers.LLAMA}")
    parser.add_argument("--vllm-preload", metavar="LIBS", help="LD_PRELOAD for vLLM (default: tcmalloc and libiomp5)")
    parser.add_argument("--threads", type=int, default=cores, help="of each engine (default: all cores)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a start or a run (default: 900)")
    kept = "keeps the checkpoint, its export and the logs (default: a temporary)"
    parser.add_argument("--workdir", type=Path, help=kept)


def check_threads(args: argparse.Namespace) -> None:
    """``ValueError`` for ``--threads`` that this machine has no cores for."""
    cores = granted_cores()
    if not 1 <= args.threads <= cores:
        raise ValueError(f"--threads must be from 1 to {cores}, the cores there are, given {args.threads}")


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, given {text}")
    return value


def start_all(engines: Engines, args: argparse.Namespace, checkpoint: Path, workdir: Path, of: Precision) -> None:
    """One after another: this engine and the peers that the flags name, each with the model as it reads it."""
    for name, options in of.engines.items():
        engines.start(peers.engine(checkpoint, options | args.engine_args, args.threads, name))
    end = "" if of.bits == 16 else f"-int{of.bits}" + (f"-g{of.group_size}" if of.group_size else "")
    if args.llama_python:
        file = checkpoint
        try:
            if checkpoint.suffix != ".gguf":
                file = workdir / f"{checkpoint.name}-{'-'.join(of.gguf)}.gguf"
                checkpoints.write_gguf(args.llama_python, checkpoint, file, *of.gguf)
            engines.start(peers.llama(args.llama_python, file, args.llama_args, args.threads))
        except ConversionFailed as error:
            engines.fail("llama.cpp", error)
    if args.vllm_python:
        directory = checkpoint
        try:
            if of.bits < 16:
                directory = workdir / f"{checkpoint.name}-compressed{end}"
                checkpoints.write_compressed(checkpoint, directory, of.bits, of.group_size)
            engines.start(peers.vllm(args.vllm_python, directory, args.vllm_args, args.threads, args.vllm_preload))
        except PeerFailed as error:
            engines.fail("vllm", error)
    if args.openvino_python:
        exported = workdir / f"{checkpoint.name}-openvino{end}"
        try:
            checkpoints.write_openvino(args.openvino_python, checkpoint, exported, of.openvino)
            for peer in peers.openvino(args.openvino_python, exported, args.openvino_args, args.threads):
                engines.start(peer)
        except ConversionFailed as error:
            engines.fail("openvino", error)
