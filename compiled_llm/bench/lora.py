"""What adapters cost: tokens a second with none, one and many, beside an engine that serves none, in turns.

    compiled-llm bench lora --shape qwen3-0.6b --dtype bfloat16 --batch-sizes 1 8 32

Adapters are random, and change all layers that adapters may change. All requests of a run start at once, with
``--input-len`` tokens, and get ``--num-tokens``; request i has adapter i modulo the number of adapters. "base" is an
engine without ``enable_lora``, "none" one with it whose requests have no adapters. With ``--modules-to-save N`` there
are runs of adapters that bring a head of their own besides: one for all requests, and N in turns. Ratios are medians
over rounds of the tokens a second within a round, to "base". With ``--vllm-python`` the same of vLLM, in the same
turns: two engines in processes of their own, which are stopped while others are measured.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench.harness import finish, in_turns, median_ratio
from compiled_llm.bench.peers.processes import PeerFailed, Worker, vllm_workers
from compiled_llm.checkpoint.shapes import config_of, engine_parser
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.system.resources import granted_cores

_BASE, _VLLM = "base", "vllm "


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "What adapters cost: tokens a second with none, one and many.")
    add = made.add_argument
    add("--num-adapters", type=int, default=32, help="of the run with many (default: 32)")
    add("--rank", type=int, default=16, help="of each adapter (default: 16)")
    add("--modules-to-save", type=int, default=0, help="adapters with a head of their own, in more runs (default: 0)")
    add("--batch-sizes", nargs="+", type=int, default=[1, 8, 32], help="requests at once (default: 1 8 32)")
    add("--input-len", type=int, default=8, help="tokens of each prompt (default: 8)")
    add("--num-tokens", type=int, default=32, help="of each output (default: 32)")
    add("--rounds", type=int, default=5, help="(default: 5)")
    add("--vllm-python", metavar="PATH", help="python of an environment with vLLM for CPUs, for a --model")
    add("--vllm-preload", metavar="LIBS", help="LD_PRELOAD for vLLM (default: tcmalloc and libiomp5)")
    add("--timeout", type=float, default=900, help="seconds for vLLM's start, or a run of it (default: 900)")
    tables.add_json_flag(made)
    return made


def write_adapter(
    directory: Path, layers: Iterable[StoredLinear], rank: int, seed: int, head: StoredLinear | None = None
) -> LoRARequest:
    """A random adapter of all ``layers``, and a whole ``head``, in PEFT's format."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in layers:
        for half, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
            values = torch.randn(shape, generator=generator) / 100
            tensors[f"base_model.model.{layer.name}.lora_{half}.weight"] = values.bfloat16()
    saved = []
    if head is not None:
        matrix = torch.randn(head.out_features, head.in_features, generator=generator) / 100
        tensors[f"base_model.model.{head.name}.weight"], saved = matrix.bfloat16(), [head.name]
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [layer.name for layer in layers],
        "modules_to_save": saved,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(directory.name, str(directory))


def tokens_per_second(
    engine: CompiledEngine, prompts: Sequence[Any], adapters: Sequence[LoRARequest | None], params: SamplingParams
) -> float:
    started = time.perf_counter()
    outputs = engine.generate(list(prompts), params, lora_request=adapters or None, use_tqdm=False, raise_on_error=True)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)


def _check(args: argparse.Namespace) -> None:
    if args.vllm_python and args.model is None:
        raise ValueError("--vllm-python needs --model, a directory with weights that vLLM can read, given none")


def vllm_tokens_per_second(
    worker: Worker, prompts: Sequence[Any], adapters: Sequence[LoRARequest | None], params: SamplingParams
) -> float:
    paths = [adapter and adapter.lora_path for adapter in adapters] or [None] * len(prompts)
    requests = [(one["prompt_token_ids"], params.max_tokens, path) for one, path in zip(prompts, paths, strict=True)]
    answer = worker.run(requests)
    return sum(answer["output_lens"]) / answer["seconds"]


def _vllm_options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Without and with adapters, as this engine's."""
    like = {"max_num_seqs": max(args.batch_sizes), "max_model_len": args.input_len + args.num_tokens + 1}
    rank = max(8, 1 << (args.rank - 1).bit_length())  # it takes powers of two
    own = {"enable_lora": True, "max_loras": args.num_adapters, "max_lora_rank": rank}
    return {"vllm base": like, "vllm lora": like | own}


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {
        "num_adapters": 1,
        "rank": 1,
        "batch_sizes": 1,
        "input_len": 1,
        "num_tokens": 1,
        "rounds": 1,
        "modules_to_save": 0,
    }
    args = parser(program).parse_checked(_check, arguments, timeout=0, **least)
    rows, results = list[dict[str, Any]](), dict[str, Any]()
    with ExitStack() as stack, errors_end(program), errors_end(program, (PeerFailed,), 1):
        served = {  # all of them: none is loaded within a run
            "enable_lora": True, "max_loras": args.num_adapters + args.modules_to_save,
            "max_lora_rank": args.rank, "max_lora_modules_to_save": args.modules_to_save or None,
        }  # fmt: skip
        base, engine = (
            stack.enter_context(
                CompiledEngine.from_config(stack.enter_context(config_of(args, enable_prefix_caching=False, **changes)))
            )
            for changes in ({"enable_lora": False}, served)
        )
        places = engine.own_runner.adapters
        assert places is not None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        adapters = [
            write_adapter(directory / str(seed), places.parts, args.rank, seed) for seed in range(args.num_adapters)
        ]
        with_heads = [
            write_adapter(directory / f"head {seed}", places.parts, args.rank, seed, places.head)
            for seed in range(args.modules_to_save)
        ]
        peers = list[Worker]()
        if args.vllm_python:
            of_vllm = args.vllm_python, Path(args.model), _vllm_options(args), granted_cores(), args.vllm_preload
            peers += stack.enter_context(vllm_workers(*of_vllm, args.timeout)).values()
        params = SamplingParams(max_tokens=args.num_tokens, temperature=0, ignore_eos=True)
        vocab_size = engine.model_config.vocab_size
        for size in args.batch_sizes:
            prompts = [
                {"prompt_token_ids": [(31 * row + 7 * place + 5) % vocab_size for place in range(args.input_len)]}
                for row in range(size)
            ]
            chosen = {_BASE: [], "none": []} | {
                f"{count}": [adapters[row % count] for row in range(size)]
                for count in sorted({1, min(size, args.num_adapters)})
            }
            of_heads = {
                f"{count} with a head": [with_heads[row % count] for row in range(size)]
                for count in sorted({1, min(size, len(with_heads))} if with_heads else ())
            }
            runs = {
                name: functools.partial(tokens_per_second, base if name == _BASE else engine, prompts, own, params)
                for name, own in (chosen | of_heads).items()
            }
            for name, own in chosen.items() if peers else ():
                worker = peers[name != _BASE]
                runs[_VLLM + name] = functools.partial(vllm_tokens_per_second, worker, prompts, own, params)
            found = in_turns(runs, rounds=args.rounds)
            results[f"batch {size}"] = {
                name: {
                    "tokens_per_second": statistics.median(speeds),
                    "ratio": median_ratio(speeds, found[_VLLM * name.startswith(_VLLM) + _BASE]),
                }
                for name, speeds in found.items()
            }
            rows += [{"batch": size, "adapters": name, **row} for name, row in results[f"batch {size}"].items()]
        print(tables.text_table(rows))
        versions = {"vllm": peers[0].versions} if peers else {}
        finish("lora", {"rank": args.rank, "runs": results, **versions}, args.json, device=engine.runner.device)
    return 0
