"""Prefill and decode apart: outputs are those of one engine, to the bit, wherever prompts are computed."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from tests.e2e.test_draft_model import SMALL, SWAP, Work, facts, random_work, serve
from tests.families import checkpoint

KEY = "a key that all of them share"
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "swap": ("qwen3", SWAP),
    "recompute, overlap": ("llama", {"preemption_mode": "recompute", "async_scheduling": True}),
    "windows": ("gemma3", SWAP),
    "latent": ("deepseek-v3", SWAP),
    "int8": ("qwen3", {**SWAP, "kv_cache_dtype": "int8"}),
    "bfloat16, no chunks": (
        "qwen2",
        {"dtype": "bfloat16", "enable_chunked_prefill": False, "token_bucket_sizes": (64,)},
    ),
    "ngram": ("llama", {**SWAP, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", KEY)


def engine_of(model: str, arguments: dict[str, Any], role: str, address: str | None = None) -> CompiledEngine:
    more = {"role": role, "kv_transfer_address": address, "kv_host_bytes": 2**20}
    if address is not None:
        more["kv_transfer_bytes"] = 2**20
    return CompiledEngine(str(checkpoint(model)), **SMALL | arguments | more)


def finished(engine: CompiledEngine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def computed(prefill: CompiledEngine, number: str, prompt: Any) -> dict[str, Any]:
    """What the prefill engine says of a prompt that it has computed."""
    prompt_only = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    prefill.add_request(number, prompt, prompt_only, kv_transfer_params={"do_remote_decode": True})
    params = finished(prefill)[number].kv_transfer_params
    assert params is not None
    assert params["do_remote_prefill"]
    return params


def serve_apart(prefill: CompiledEngine, decode: CompiledEngine, work: Work) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for number, (prompt, params) in enumerate(work):
        given = None if params.prompt_logprobs else computed(prefill, str(number), prompt)
        decode.add_request(str(number), prompt, params, kv_transfer_params=given)
        for _ in range(2):
            outputs |= {output.request_id: output for output in decode.step()}
    return outputs | finished(decode)


@pytest.mark.parametrize(
    ("name", "count", "transport"),
    [
        pytest.param("windows", 10, "unix", id="small-unix"),
        pytest.param("swap", 10, "tcp", id="small-tcp"),
        *(
            pytest.param(name, 200, transport, id=f"full-{name}-{transport}", marks=pytest.mark.battery)
            for name in ENGINES
            for transport in ("unix", "tcp")
        ),
    ],
)
def test_outputs_are_those_of_one_engine(name: str, count: int, transport: str, tmp_path: Path) -> None:
    (model, arguments), rng = ENGINES[name], random.Random(name)
    work = [
        (prompt, dataclasses.replace(params, num_speculative_tokens=None)) for prompt, params in random_work(rng, count)
    ]
    with CompiledEngine(str(checkpoint(model)), **SMALL | arguments) as engine:
        expected = serve(engine, work)
    address = f"unix:{tmp_path}/blocks" if transport == "unix" else "127.0.0.1:0"
    with engine_of(model, arguments, "prefill", address) as prefill, engine_of(model, arguments, "decode") as decode:
        outputs = serve_apart(prefill, decode, work)
        for number, output in outputs.items():
            assert facts(output) == facts(expected[number]), f"request {number}: {work[int(number)]}"
        stats, given = decode.stats(), prefill.stats()
        assert stats.peer_hit_tokens > 0
        assert stats.num_takes_failed == 0
        assert stats.peer_taken_bytes > 0
        assert given.peer_given_bytes > 0
