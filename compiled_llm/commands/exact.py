"""Prove on one's own model and machine that a request's bits do not depend on how it is served.

    compiled-llm exact --quick
    compiled-llm exact --model DIR --json exact.json
    compiled-llm exact --model DIR --lora ADAPTER ADAPTER

The same requests are served in a matrix of settings: bucket and chunk sizes, compiled and uncompiled, each with the
model's KV cache and the quantised ones, each request alone and together with the others, with a cold and a warm prefix
cache, and with so little memory that requests are preempted, and computed again or swapped. Half of the requests are
greedy, the others seeded; some have penalties or ask for log-probabilities of their prompts.

With ``--lora``, requests have the adapters in turn, and none: so they run mixed with others of other adapters, and with
two adapters or more each is evicted from its slot, read from its files and loaded again.

Compared with the first setting of the same KV cache, bit for bit, are

- the hidden state of every token that is computed, of prompts and of outputs, that is what the model's head takes;
- every row of logits;
- the tokens, and the log-probabilities of tokens and prompts, as the engine returns them.

For the first request that differs, the two settings are run once more with every op watched, and the first layer and op
are named at which they part. On a GPU all engines have ``exact=True``, and uncompiled settings are left out: there,
compiled code may round otherwise.

Ends in one JSON line. Exit status: 0 if all is equal; 1 on a difference, or if a setting did not come about, such as a
preemption; 2 for bad arguments.
"""

import time
from collections.abc import Sequence

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, errors_end
from compiled_llm.api.config_pairs import QUANTISED_DTYPES

_ENGINE_ARGUMENTS = (
    "model",
    "load_format",
    "dtype",
    "quantization",
    "compress_weights",
    "keep_weights_twice",
    "device",
    "seed",
    "max_lora_rank",
)
_KV_CACHES = ("auto", *QUANTISED_DTYPES)
_FULL, _QUICK = (20, 32), (12, 16)  # requests, and tokens of each output


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Prove that a request's bits do not depend on how it is served.")
    add = made.add_argument
    add("--quick", action="store_true", help="fewer buckets and requests: minutes for a small model")
    add(
        "--kv-cache-dtypes",
        type=lambda text: text.split(","),
        default=list(_KV_CACHES),
        metavar="NAME[,NAME...]",
        help=f"dtypes of KV caches (default: {','.join(_KV_CACHES)})",
    )
    add("--lora", nargs="+", default=[], metavar="PATH", help="adapters that requests have in turn, beside none")
    add("--requests", type=int, metavar="N", help=f"how many (default: {_FULL[0]}; {_QUICK[0]} with --quick)")
    add("--tokens", type=int, metavar="N", help=f"of each output (default: {_FULL[1]}; {_QUICK[1]} with --quick)")
    tables.add_json_flag(made)
    add_engine_arguments(made, *_ENGINE_ARGUMENTS)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(arguments=arguments, requests=1, tokens=1, seed=0)
    requests, tokens = _QUICK if args.quick else _FULL

    from compiled_llm.exact import check, matrix  # they load torch, which takes seconds
    from compiled_llm.system import hardware

    started = time.perf_counter()
    with errors_end(program):
        engine = {name: getattr(args, name) for name in _ENGINE_ARGUMENTS}
        sizes = matrix.QUICK_SIZES if args.quick else tuple(matrix.SIZES)
        counts = args.requests or requests, args.tokens or tokens
        plan = check.make_plan(engine, *counts, args.kv_cache_dtypes, sizes, args.lora)
        outcomes, first = check.check(plan)
    rows, result = [check.row_of(outcome) for outcome in outcomes], check.result_of(outcomes, first)
    print(tables.text_table(rows))
    print(
        f"\n{args.model or 'the bundled model'}: {result['requests']:,} requests in {len(rows)} settings, "
        f"{result['preempted']:,} preemptions, "
        f"compared {result['logits']:,} rows of logits, {result['all_compared']:,} values in all"
    )
    for outcome in outcomes:
        if outcome.missing:
            print(f"not proven, {outcome.missing}: {outcome.setting}")
    if first is not None:
        print(first)
    print(result["verdict"].upper())
    result |= {"seconds": round(time.perf_counter() - started, 1), "machine": hardware.describe(plan.device)}
    tables.finish(result, args.json, {"table": rows})
    return 0 if result["verdict"] == "equal" else 1
