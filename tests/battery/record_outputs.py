"""What the engine gives for a fixed set of requests, recorded to compare two commits bit for bit, on CPUs.

    python -m tests.battery.record_outputs --write before.json
    python -m tests.battery.record_outputs --compare before.json
    python -m tests.battery.record_outputs --compare before.json --only qwen3-float16   # some of the engines

Tiny checkpoints of each family with seeded random weights, in every dtype and KV cache dtype, run eagerly, and the demo
model compiled. A recording has token ids, texts, log-probabilities as exact hexadecimal floats, reasons of the ends,
prefix hits and preemptions of every request, and the numbers of steps of every engine. Exit status of ``--compare``: 0,
or 1 if something differs; the first differences of each case are printed. It uses the public interface alone, so that
the same file runs on both commits. Both must run with the same torch, on the same kind of machine.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import compiled_llm
from compiled_llm import AsyncCompiledEngine, CompiledEngine, Field, LogitsTransform, SamplingParams

DEMO_MODEL = Path(compiled_llm.__file__).parent / "demo_model"
# Vocabulary and end-of-text token are the demo model's, whose tokenizer they all have.
_SMALL: dict[str, Any] = {"vocab_size": 4096, "bos_token_id": None, "eos_token_id": 0, "max_position_embeddings": 512}
_SMALL |= {"hidden_size": 112, "intermediate_size": 160, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ROPE |= {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
# Name -> transformers' model class without ForCausalLM, and its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_SMALL, "rope_parameters": _LLAMA3_ROPE}),
    "llama-biases": ("Llama", {**_SMALL, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", {**_SMALL, "tie_word_embeddings": True}),
}
DTYPES = ("float32", "bfloat16", "float16")
CACHE_DTYPES = ("auto", "int8", "fp8")

PROMPTS = [
    "def add(a, b):",
    "import os\n\n\ndef main():\n    parser =",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "for i in range(10):\n    print(i",
    "x",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "# Sorts the numbers and returns those that are above their mean.\ndef above(numbers):\n    total = sum",
    "try:\n    value = int(text)\nexcept ValueError:",
]
SHARED = "from collections import Counter\n\n\ndef most_common(words, count):\n    counter = Counter()\n    for word in"
STRUCTURES: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"regex": "[a-f]{3}-[0-9]{4}"},
    {"choice": ["yes", "no", "perhaps so"]},
    {"grammar": 'start: NAME "(" NAME ("," NAME)* ")"\nNAME: /[a-z_]{1,8}/'},
]


class Lift(LogitsTransform):
    """Adds to the logits of every third token, the more the later the position is."""

    name = "lift"
    fields = {"strength": Field((), torch.float32, 0.0)}  # noqa: RUF012

    def row(self, argument: Any, vocab_size: int) -> dict[str, float]:
        return {"strength": float(argument)}

    def __call__(self, logits: torch.Tensor, fields: Any, context: Any) -> torch.Tensor:
        third = (torch.arange(logits.shape[1], device=logits.device) % 3 == 0).float()
        return logits + (fields["strength"] * context.position.float().log1p())[:, None] * third


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, **options})


def seeded(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 12, **options})


# -- Cases: from an engine to outputs


def parameters(engine: CompiledEngine) -> list[Any]:
    """Every sampling parameter, alone in its request and then together, all in one batch."""
    first = engine.generate(PROMPTS, greedy(), use_tqdm=False)
    texts = [output.outputs[0].text for output in first]
    tokens = [output.outputs[0].token_ids for output in first]
    middles = [text[len(text) // 2 :][:3] for text in texts]
    params = [
        greedy(logprobs=5, prompt_logprobs=3),
        seeded(1, temperature=0.7),
        seeded(2, temperature=0.9, top_p=0.8, logprobs=2),
        seeded(3, top_k=20, prompt_logprobs=0),
        seeded(4, min_p=0.05, top_p=0.95, top_k=50),
        greedy(presence_penalty=1.5, frequency_penalty=0.5),
        seeded(5, repetition_penalty=1.3, temperature=0.8, logprobs=0),
        greedy(logit_bias={tokens[7][2]: -100, 17: 3.5}, logprobs=3),
        seeded(6, allowed_token_ids=[5, 17, 99, 300, 1234, 4000], temperature=2.0),
        greedy(bad_words=[texts[1].split()[-1], middles[1]]),
        greedy(stop_token_ids=[tokens[2][1], tokens[2][5]], min_tokens=4),
        greedy(stop=[middles[3], "\n\n\n"]),
        greedy(stop=middles[4], include_stop_str_in_output=True, logprobs=1),
        greedy(stop_token_ids=tokens[5][3:4]),
        seeded(7, n=3, temperature=0.9, logprobs=1),
        seeded(8, truncate_prompt_tokens=5),
        greedy(logit_bias={0: 30.0}),
        greedy(logit_bias={0: 30.0}, ignore_eos=True, skip_special_tokens=False),
        seeded(9, detokenize=False),
        SamplingParams(max_tokens=12),  # the seed follows from the engine's and the number of the request
        seeded(10, n=2, top_p=0.9, top_k=40, min_p=0.01, frequency_penalty=0.3, logit_bias={7: 2.0}, logprobs=4),
    ]
    if engine.config.logits_transforms:
        params += [greedy(logits_transforms={"lift": 0.8}, logprobs=2), seeded(11, logits_transforms={"lift": -0.5})]
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(len(params))]
    return [*first, *engine.generate(prompts, params, use_tqdm=False)]


def structures(engine: CompiledEngine) -> list[Any]:
    """Structured outputs, each alone: in which step a grammar is ready must not matter."""
    params = [seeded(n, max_tokens=24, logprobs=1, structured_outputs=some) for n, some in enumerate(STRUCTURES)]
    return [engine.generate(PROMPTS[n], param, use_tqdm=False)[0] for n, param in enumerate(params)]


def mixed_structures(engine: CompiledEngine) -> list[Any]:
    """Structured outputs in a batch with others."""
    params = [greedy(structured_outputs=some, max_tokens=20) for some in STRUCTURES] + [greedy(), seeded(3, n=2)]
    return engine.generate([SHARED + prompt for prompt in PROMPTS[: len(params)]], params, use_tqdm=False)


def prefixes(engine: CompiledEngine) -> list[Any]:
    """Prefixes shared in the same step, later, and kept apart by a salt."""
    prompts: list[Any] = [SHARED + prompt for prompt in PROMPTS[:5]]
    salted: list[Any] = [{"prompt": prompt, "cache_salt": "a"} for prompt in prompts[:3]]
    engine.reset_prefix_cache()
    outputs = []
    for some in (prompts[:3], prompts, salted, salted, SHARED):
        outputs += engine.generate(some, greedy(logprobs=1, max_tokens=6), use_tqdm=False)
    outputs += engine.generate(outputs[-1].prompt_token_ids, greedy(), use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) > 0
    return outputs


def beams(engine: CompiledEngine) -> list[Any]:
    found = engine.beam_search(PROMPTS[:3], 3, max_tokens=8) + engine.beam_search(PROMPTS[5], 4, max_tokens=32)
    return found + engine.beam_search(PROMPTS[3], 2, max_tokens=6, length_penalty=0.5, ignore_eos=True)


def streams(engine: CompiledEngine) -> list[Any]:
    """All outputs of streams, one by itself and two taken in turns."""
    outputs = list(engine.stream(PROMPTS[0], seeded(1, logprobs=1)))
    pairs = zip(engine.stream(PROMPTS[1], greedy()), engine.stream(PROMPTS[2], seeded(2)), strict=True)
    return outputs + [output for pair in pairs for output in pair]


def aborts(engine: CompiledEngine) -> list[Any]:
    """Requests that are aborted while they wait or run, and a stream that is closed, together with others in a loop."""
    params = [seeded(n, n=3, logprobs=0) if n % 2 else greedy() for n in range(10)]
    for n, param in enumerate(params):
        engine.add_request(f"abort-{n}", PROMPTS[n % 8] + SHARED[:n], param)
    stream = engine.stream(PROMPTS[0], greedy())
    outputs = [next(stream)]
    stream.close()
    for aborted in ("abort-1", "abort-9", ["abort-0", "abort-7", "unknown"]):
        engine.abort(aborted)
        outputs += engine.step() + engine.step()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def chats(engine: CompiledEngine) -> list[Any]:
    talk = [{"role": "user", "content": "Add two numbers."}]
    more = [*talk, {"role": "assistant", "content": " add(a, b):"}, {"role": "user", "content": "And three?"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    outputs = engine.chat([talk, more], greedy(), use_tqdm=False) + engine.chat(talk, use_tqdm=False)
    return outputs + engine.chat(more[:2], seeded(4), use_tqdm=False, **options)


def preempted(engine: CompiledEngine) -> list[Any]:
    """More requests than the KV cache has blocks for, of prompts longer than a step; priorities if they are on."""
    priorities = [n % 3 for n in range(10)] if engine.config.scheduling_policy == "priority" else None
    prompts = [PROMPTS[n % 8] * (1 + n % 3) for n in range(10)]
    params = [seeded(n, max_tokens=24, ignore_eos=n % 4 == 0) for n in range(10)]
    params[1::3] = [greedy(max_tokens=24, logprobs=1)] * 3
    params[5] = seeded(5, max_tokens=24, n=2, frequency_penalty=0.5)
    params[8] = greedy(structured_outputs=STRUCTURES[1])
    outputs = engine.generate(prompts, params, use_tqdm=False, priority=priorities)
    counts = engine.stats()
    assert (counts.num_swap_preemptions if engine.config.swap_space_bytes else counts.num_recompute_preemptions) > 0
    return outputs


def asynchronous(engine: CompiledEngine) -> list[Any]:
    """Final outputs of an ``AsyncCompiledEngine``, which closes the engine.

    One after the other, and in eager bfloat16 also at once: there a row has the same bits in any bucket, so they do
    not depend on when each request comes. For the same reason nothing is read of the prefix cache.
    """
    params = [greedy(logprobs=2), seeded(1, n=2), greedy(structured_outputs=STRUCTURES[2]), seeded(2, logprobs=1)]

    async def run() -> list[Any]:
        async with AsyncCompiledEngine.from_engine(engine) as served:

            async def last(n: int) -> Any:
                prompt = {"prompt": PROMPTS[n % 8] + str(n), "cache_salt": str(n)}
                return [output async for output in served.generate(prompt, params[n % 4], request_id=f"r{n}")][-1]

            outputs = [await last(n) for n in range(4)]
            if engine.config.dtype == "bfloat16" and engine.config.enforce_eager:
                outputs += await asyncio.gather(*(last(n) for n in range(4, 12)))
            return outputs

    return asyncio.run(run())


Case = Callable[[CompiledEngine], list[Any]]
SERVING: list[Case] = [parameters, structures, mixed_structures, prefixes, beams, streams, aborts, chats]


# -- Engines


def engines() -> Iterator[tuple[str, str, dict[str, Any], list[Case]]]:
    """(name, model, engine arguments, cases) of everything that is recorded."""
    eager = {"enforce_eager": True, "check_invariants": True, "bucket_sizes": (1, 4, 8), "max_model_len": 256}
    large = {"num_kv_blocks": 160, "token_bucket_sizes": (32, 64), "max_num_batched_tokens": 64}
    large |= {"logits_transforms": (Lift(),)}
    small = {"num_kv_blocks": 16, "block_size": 8, "max_num_batched_tokens": 20, "max_model_len": 128, "seed": 3}
    swap = {"preemption_mode": "swap", "swap_space_bytes": 2**20, "async_scheduling": True}
    recompute = {"preemption_mode": "recompute", "scheduling_policy": "priority"}
    for model, (i, dtype), (j, cache) in itertools.product(MODELS, enumerate(DTYPES), enumerate(CACHE_DTYPES)):
        if model == "llama-biases" and i != j:
            continue
        name, kind = f"{model}-{dtype}-{cache}", {**eager, "dtype": dtype, "kv_cache_dtype": cache}
        skip = {} if cache == "auto" else {"kv_cache_skip_layers": (0,)}
        yield f"{name}-large", model, {**kind, **large}, [*SERVING, asynchronous]
        yield f"{name}-swap", model, {**kind, **small, **swap}, [preempted, parameters]
        yield f"{name}-recompute", model, {**kind, **small, **recompute, **skip}, [preempted, structures, aborts, beams]
    whole = {"load_format": "dummy", "enable_chunked_prefill": False, "enable_prefix_caching": False, "block_size": 4}
    yield "dummy-bfloat16", "qwen3", {**eager, **whole, "dtype": "bfloat16", "num_kv_blocks": 200}, [parameters, beams]
    compiled: dict[str, Any] = {"bucket_sizes": (8,), "token_bucket_sizes": (64,), "max_num_batched_tokens": 64}
    compiled |= {"dtype": "bfloat16", "num_kv_blocks": 60, "compile_workers": 0}
    yield "compiled-bfloat16-auto", "demo", compiled, [*SERVING, asynchronous]
    compiled |= {"dtype": "float32", "kv_cache_dtype": "int8", "max_model_len": 256, "num_kv_blocks": 20}
    yield "compiled-float32-int8", "demo", {**compiled, **swap}, [preempted, parameters, beams]


def write_checkpoint(model: str, directory: Path) -> None:
    """A tiny checkpoint of a family, with weights that follow from their order and shapes alone."""
    class_name, fields = MODELS[model]
    module = getattr(transformers, f"{class_name}ForCausalLM")(getattr(transformers, f"{class_name}Config")(**fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1 if "norm" in name else noise)
    module.save_pretrained(directory)


# -- Recordings


def recorded(output: Any) -> dict[str, Any]:
    """A ``RequestOutput`` without its times. Messages of errors are left out: they may be reworded."""
    return {
        "request_id": output.request_id,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "num_preemptions": output.metrics.num_preemptions,
        "finished": output.finished,
        "prompt_logprobs": logprobs(output.prompt_logprobs),
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "stop_reason": None if one.finish_reason == "error" else one.stop_reason,
                "cumulative_logprob": None if one.cumulative_logprob is None else one.cumulative_logprob.hex(),
                "logprobs": logprobs(one.logprobs),
            }
            for one in output.outputs
        ],
    }


def logprobs(positions: list[Any] | None) -> list[Any] | None:
    """``"token:logprob:rank:text"`` of each token of each position."""
    return positions and [
        position and [f"{i}:{p.logprob.hex()}:{p.rank}:{p.decoded_token}" for i, p in position.items()]
        for position in positions
    ]


def record(only: str = "") -> dict[str, Any]:
    """Run the engines whose names contain ``only``: case -> what it gave."""
    cases: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        directories = {"demo": DEMO_MODEL}
        for name, model, arguments, functions in engines():
            if only not in name:
                continue
            if model not in directories:
                directories[model] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                write_checkpoint(model, directories[model])
            options = {"tokenizer": str(DEMO_MODEL), "progress": "off", **arguments}
            with CompiledEngine(str(directories[model]), **options) as engine:
                for function in functions:
                    print(f"{name}/{function.__name__}", file=sys.stderr, flush=True)
                    if function is asynchronous:  # the last, since it closes the engine
                        cases[f"{name}/steps"] = steps(engine)
                    cases[f"{name}/{function.__name__}"] = [recorded(output) for output in function(engine)]
                cases.setdefault(f"{name}/steps", steps(engine))
    return cases


def steps(engine: CompiledEngine) -> dict[str, int]:
    """The engine's counts, without the times."""
    stats = engine.stats()
    names = ("num_steps", "num_computed_tokens", "num_padding_tokens", "num_recomputed_tokens", "prefix_hit_tokens")
    return {name: getattr(stats, name) for name in (*names, "num_swapped_out_tokens", "num_evictions", "used_blocks")}


def differences(before: Any, after: Any, path: str) -> Iterator[str]:
    """``path: before -> after`` of everything in which two recordings differ, in order."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            yield from differences(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for n, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{n}]")
    elif before != after or type(before) is not type(after):
        yield f"{path}: {str(before)[:200]!r} -> {str(after)[:200]!r}"


def compare(before: dict[str, Any], after: dict[str, Any], most: int = 4) -> int:
    """Print the first differences of each case; returns how many cases differ."""
    num_different = 0
    for case in before | after:
        if case in before and case in after:
            found = list(differences(before[case], after[case], case))
        else:
            found = [f"{case}: only in the {'file' if case in before else 'new recording'}"]
        num_different += bool(found)
        for line in found[:most]:
            print(line)
        if len(found) > most:
            print(f"{case}: and {len(found) - most} more")
    print(f"{len(before | after)} cases, {num_different} differ")
    return num_different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the recording there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with a recording, exit 1 if they differ")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the engines whose names contain this")
    args = parser.parse_args()
    if args.write is None and args.compare is None:
        parser.error("give --write FILE, --compare FILE or both")
    names = [name for name, *_ in engines()]
    if not any(args.only in name for name in names):
        parser.error(f"--only must be a part of one of {', '.join(names)}, given {args.only}")
    before = json.loads(args.compare.read_text()) if args.compare else None
    cases = record(args.only)
    made_by = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    made_by["cpu"] = torch.backends.cpu.get_cpu_capability()
    if args.write:
        args.write.write_text(json.dumps({"made_by": made_by, "cases": cases}, indent=0) + "\n")
        print(f"{args.write}: {len(cases)} cases")
    if before is None:
        return 0
    if before["made_by"] != made_by:
        print(f"the file was made by {before['made_by']}, this recording by {made_by}")
    expected = {case: value for case, value in before["cases"].items() if args.only in case.split("/")[0]}
    return int(compare(expected, json.loads(json.dumps(cases))) > 0)


if __name__ == "__main__":
    sys.exit(main())
