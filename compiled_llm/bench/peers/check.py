"""Whether the engines of ``bench peers`` compute the same model: transformers judges the tokens that each generates.

    compiled-llm bench peers --check --precision int4 --llama-python VENV/bin/python --vllm-python VENV/bin/python

Each engine, one at a time, continues the same prompts greedily, from one checkpoint as ``bench peers`` converts it.
The model as it was, in float32 by transformers, then reads each continuation. The regret of a token is the
log-probability of the token that the model finds likeliest there, less that of the token itself, in nats. It is 0 where
both choose the same token, and small where rounding turned a near tie. ``agreement`` is the share of tokens with a
regret of 0. A conversion is checked most sharply with ``--precision bf16``, where least is rounded.

The last line is JSON. Exit status 1 if an engine failed or its mean regret is more than ``--most-regret``.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from compiled_llm.api import tables
from compiled_llm.bench import hf
from compiled_llm.bench.harness import finish
from compiled_llm.bench.peers.checkpoints import ConversionFailed
from compiled_llm.bench.peers.engines import start_all
from compiled_llm.bench.peers.precisions import precision
from compiled_llm.bench.peers.processes import Peer, PeerFailed, Worker
from compiled_llm.bench.workloads import Requests, WorkloadRequest
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 512
MOST_REGRET = {"bf16": 0.002, "int8": 0.005, "int4": 0.04}  # twice what was seen, at least: docs/peers.md


class Judge:
    """Runs the prompts on every engine that it is given, and keeps what became of each.

    Attributes:
        found: of each engine: ``regret`` (mean, nats), ``worst`` (the largest of a token), ``agreement``, ``tokens``,
            ``versions`` and ``failed`` (None: it did not).
    """

    def __init__(self, model: Any, requests: Requests, logs: Path, timeout: float) -> None:
        self._model, self._requests, self._logs, self._timeout = model, requests, logs, timeout
        self.found: dict[str, dict[str, Any]] = {}

    def fail(self, name: str, error: PeerFailed | ConversionFailed) -> None:
        print(f"FAILED: {error}", file=sys.stderr)
        self.found[name] = {"failed": str(error)}

    def start(self, peer: Peer) -> None:
        outputs, requests = [], self._requests
        try:
            worker = Worker(peer, self._logs / f"{peer.name}.log", self._timeout)
            try:
                # Together where the engine can: so batches of several requests are judged too.
                for part in [[one] for one in requests] if peer.single_requests_only else [requests]:
                    outputs += worker.run(part)["token_ids"]
            finally:
                worker.close()
        except PeerFailed as error:
            self.fail(peer.name, error)
            return
        pairs = zip(requests, outputs, strict=True)
        regrets = torch.cat([token_regrets(self._model, one.prompt_token_ids, tokens) for one, tokens in pairs])
        self.found[peer.name] = {
            "regret": regrets.mean().item(),
            "worst": regrets.max().item(),
            "agreement": (regrets == 0).double().mean().item(),
            "tokens": len(regrets),
            "versions": worker.versions,
            "failed": None,
        }
        print(f"{peer.name}: mean regret {self.found[peer.name]['regret']:.4f}", file=sys.stderr)


def token_regrets(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of each token of a continuation, ``[len(tokens)]``, nats."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("check").add_argument
    add("--check", action="store_true", help="measure nothing: do all compute --model, by default the bundled one?")
    add("--output-len", type=int, default=48, help="tokens after each prompt (default: 48)")
    bars = ", ".join(f"{name} {bar}" for name, bar in MOST_REGRET.items())
    most = f"nats: an engine whose mean is more has another model (default: {bars})"
    add("--most-regret", type=float, metavar="NATS", help=most)


def requests_of(model: Path, output_len: int) -> Requests:
    """The demo model's prompts, by the tokenizer of ``model``."""
    tokenizer, lines = Tokenizer(model), (DEMO_MODEL / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [WorkloadRequest(tokenizer.encode(json.loads(line)["prompt"]), output_len) for line in lines]


def run(args: argparse.Namespace, workdir: Path) -> int:
    """All engines, one after another; the exit status."""
    model = DEMO_MODEL if args.model is None else Path(args.model)
    bar = MOST_REGRET[args.precision] if args.most_regret is None else args.most_regret
    args.engine_args = {"max_model_len": MAX_MODEL_LEN} | args.engine_args
    args.vllm_args = {"max_model_len": MAX_MODEL_LEN} | args.vllm_args
    of = precision(args.precision, args.group_size)
    module = hf.load(model, "float32", torch.device("cpu"), 0, random_weights=False)
    judge = Judge(module, requests_of(model, args.output_len), workdir, args.timeout)
    start_all(judge, args, model, workdir, of)
    columns = ("regret", "worst", "agreement", "tokens")
    judged = {name: facts for name, facts in judge.found.items() if not facts["failed"]}
    if judged:
        print(tables.text_table([{"": name, **{key: facts[key] for key in columns}} for name, facts in judged.items()]))
    bad = [f"FAILED: {facts['failed']}" for facts in judge.found.values() if facts["failed"]]
    bad += [
        f"ANOTHER MODEL: {name} has a mean regret of {facts['regret']:.3g} nats, over {bar:g}"
        for name, facts in judged.items()
        if facts["regret"] > bar
    ]
    print("\n".join(bad))
    result = {"precision": args.precision, "group_size": of.group_size, "engines": judge.found}
    finish("check-peers", result, args.json)
    return 1 if bad else 0
