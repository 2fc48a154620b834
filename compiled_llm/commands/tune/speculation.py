"""Say which method of drafting, and how many drafts, suit the work of earlier runs on this machine.

    compiled-llm batch --model DIR --input prompts.jsonl --output results.jsonl
    compiled-llm tune speculation --model DIR --trace results.jsonl
    compiled-llm tune speculation --model DIR --trace results.jsonl --batch-sizes 1 8 --draft-tokens 2 5
    compiled-llm tune speculation --model DIR --trace results.jsonl --drafters eagle3=HEAD --temperature 0
    compiled-llm tune speculation --trace results.jsonl --step-seconds tuned.json    # no model runs

``--trace`` takes results of ``compiled-llm batch``, or the rows that it takes, which the model answers first. The
outputs are served again by the scheduler with each method, with no model: what would be drafted, and what of it is
right, follows from the tokens. What a network drafts follows from more than that: an engine with each such method, and
with each number of its drafts, starts once, computes over prompts and outputs what it would draft behind each token,
and measures what that takes. Outputs of a trace are taken to be sampled with the flags of sampling, with the seeds that
``batch`` gives; the share of tokens that the model chooses again is printed. ``--serve-again`` takes only prompts and
lengths of a trace, for outputs whose seeds nobody knows. The start measures steps of each number of requests and
drafts; ``--step-seconds`` reads those that ``--json`` of an earlier run wrote. With it, methods that draft from tokens
alone need no model but its tokenizer, and not even that where the trace has ``prompt_token_ids``. The last lines are
the flag to paste and a line of JSON.

Exit status: 0, also where no method is worth it; 1 if the model cannot answer a row; 2 for bad arguments.
"""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import (
    FlagParser,
    add_drafters_flag,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    errors_end,
    sampling_arguments,
    sampling_params,
)
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.speculative_config import METHODS, NETWORK_METHODS
from compiled_llm.offline.flags import DEFAULT_SAMPLING

if TYPE_CHECKING:
    from compiled_llm.api.sampling_params import SamplingParams
    from compiled_llm.engine.engine import CompiledEngine
    from compiled_llm.tuning.draft_replay import KnownDrafts, KnownRequest
    from compiled_llm.tuning.speculation import TraceLine

_FROM_TOKENS = ("ngram", "suffix")  # what others draft a model has to say
_MASKS = ("min_tokens", "allowed_token_ids", "bad_words", "structured_outputs")  # are not applied to known tokens
_NO_OUTPUT = ("logprobs", "prompt_logprobs", "detokenize", "output_kind", "num_speculative_tokens")
_LOOKUPS = [(1, 3), (2, 4), (3, 5), (5, 5)]
_BATCH_SIZES = (1, 4, 16)


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Say which method of drafting suits the work of earlier runs.")
    add = made.add_argument
    add("--trace", type=Path, nargs="+", required=True, metavar="FILE", help="results of batch, or rows for it")
    methods = "(default: ngram suffix, and those of --drafters)"
    add("--methods", nargs="+", choices=tuple(METHODS), help=methods)
    add_drafters_flag(made)
    tokens = "most drafts to try (default: 3 7 15, of networks two numbers)"
    add("--draft-tokens", type=int, nargs="+", metavar="N", help=tokens)
    lookups = "lookups of ngram to try (default: 1-3 2-4 3-5 5-5)"
    add("--prompt-lookups", type=_lookup, nargs="+", default=_LOOKUPS, metavar="MIN-MAX", help=lookups)
    add("--trees", action="store_true", help="also with speculative_token_tree auto, which some models refuse")
    sizes = "requests at once (default: 1 4 16, up to --max-num-seqs)"
    add("--batch-sizes", type=int, nargs="+", metavar="N", help=sizes)
    add("--max-requests", type=int, default=200, metavar="N", help="of the trace, the first ones (default: 200)")
    add("--serve-again", action="store_true", help="the model answers all prompts anew; outputs say at most how long")
    add("--step-seconds", type=Path, metavar="FILE", help="take those of an earlier --json instead of measuring")
    tables.add_json_flag(made)
    add_sampling_arguments(made, _NO_OUTPUT, **DEFAULT_SAMPLING)
    add_engine_arguments(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(_check, arguments, batch_sizes=1, max_requests=1, draft_tokens=1)
    from compiled_llm.tuning import speculation  # which takes seconds, as what it loads does

    with errors_end(program):
        lines = speculation.read_trace(args.trace)
        if len(lines) > args.max_requests:
            print(f"{program}: the first {args.max_requests} of {len(lines)} requests are taken (--max-requests)")
            lines = lines[: args.max_requests]
        lines, params = _to_be_served(args, lines)
        seconds: dict[tuple[int, int], float] = {}
        one_graph = True
        if args.step_seconds is not None:
            seconds, one_graph = speculation.step_seconds_of(args.step_seconds, args.batch_sizes)
        counts, drafters = args.draft_tokens, dict(args.drafters)
        found = speculation.candidates(args.methods, args.prompt_lookups, counts, trees=args.trees, drafters=drafters)
        configs = list(found)
        if any(config["method"] in NETWORK_METHODS for config in configs):
            from compiled_llm.tuning.draft_recording import check_networks

            check_networks(engine_config(args), configs)
    with errors_end(program), errors_end(program, (_UnansweredError,), status=1):
        seen: Mapping[int, KnownDrafts] = {}
        if args.step_seconds is None or "lookahead" in args.methods or any(line.row is not None for line in lines):
            most, measures = max(config["num_speculative_tokens"] for config in configs), args.step_seconds is None
            # Any method that drafts so many has its engine measure the steps.
            drafting = {"method": "ngram", "num_speculative_tokens": most, "adaptive": measures}
            with _started(args, drafting) as engine:
                if measures:
                    assert engine.scheduler.drafts is not None
                    seconds = dict(engine.scheduler.drafts.costs.measured)
                    one_graph = engine.scheduler.limits.mixes_lens
                requests = _answered(engine, args, lines, params)
                if "lookahead" in args.methods:
                    from compiled_llm.tuning.draft_recording import of_lookahead

                    seen = of_lookahead(engine, requests, configs)
        else:
            requests = [request for of_line in _known(args, lines, engine_config(args)) for request in of_line]
        sizes = _sizes(program, args, sum(len(request.output_token_ids) > 1 for request in requests))
        drafts = itertools.chain(seen.items(), _of_networks(program, args, requests, configs, sizes))
        even = speculation.never_falling(seconds)
        fallen = speculation.as_names({sizes: value for sizes, value in seconds.items() if even[sizes] != value})
        if fallen:
            print(
                f"{program}: steps with more drafts took less time than some with fewer, as on a busy machine, and "
                f"means are taken: {', '.join(fallen)}"
            )
        result = speculation.tune(requests, configs, sizes, even, one_graph=one_graph, drafts=drafts)
    print(speculation.text_of(result, all_answered=len(params) == len(lines)))

    import torch

    from compiled_llm.system import hardware

    facts = {"step_seconds": speculation.as_names(seconds), "one_graph": one_graph}
    machine = {"machine": hardware.describe(torch.device("cpu" if one_graph else "cuda"))}
    if args.step_seconds is not None:  # they are of another run
        machine = {}
    tables.finish(speculation.as_json(result) | facts | machine, args.json)
    return 0


class _UnansweredError(Exception):
    """The model could not answer a row of the trace."""


def _check(args: argparse.Namespace) -> None:
    most = args.max_num_seqs
    if args.batch_sizes is None:
        args.batch_sizes = [size for size in _BATCH_SIZES if most is None or size <= most]
    if args.batch_sizes != sorted(set(args.batch_sizes)):
        raise ValueError(f"--batch-sizes must rise, given {' '.join(map(str, args.batch_sizes))}")
    if most is not None and args.batch_sizes[-1] > most:
        raise ValueError(f"--batch-sizes must be at most --max-num-seqs, {most}, given {args.batch_sizes[-1]}")
    if args.bucket_sizes is not None and not set(args.batch_sizes) <= set(args.bucket_sizes):
        sizes = ", ".join(map(str, args.bucket_sizes))
        raise ValueError(f"--batch-sizes must be among --bucket-sizes, {sizes}, given {args.batch_sizes}")
    if args.speculative_config is not None:
        raise ValueError("--speculative-config must be left out: it is what is looked for")
    _check_methods(args)
    sampling_params(args)  # its errors come before torch is loaded
    if args.serve_again and "min_tokens" in sampling_arguments(args):
        raise ValueError("--min-tokens must be left out with --serve-again: outputs say how long new ones may be")
    if from_model := _from_model(args):
        for name in _MASKS:
            if sampling_arguments(args).get(name):
                raise ValueError(f"--{name.replace('_', '-')} must be left out {_no_masks(from_model)}")
        ranks = args.tensor_parallel_size, args.pipeline_parallel_size
        if args.model_process or ranks != (1, 1):
            raise ValueError(
                f"--model-process must be left out, and --tensor-parallel-size and --pipeline-parallel-size be 1, for "
                f"--methods {from_model}: drafts are looked at in this process"
            )


def _check_methods(args: argparse.Namespace) -> None:
    drafters = dict(args.drafters)
    if args.methods is None:
        args.methods = list(dict.fromkeys((*_FROM_TOKENS, *drafters)))
    for method in drafters:
        if method not in args.methods:
            raise ValueError(f"--drafters must be of --methods, {' '.join(args.methods)}, given {method}")
    for method in args.methods:
        if "model" in METHODS[method].needs and method not in drafters:
            raise ValueError(f"--drafters must have {method}=DIR for --methods {method}, given none")
        given, most = max(args.draft_tokens or [1]), METHODS[method].most
        if given > most:
            raise ValueError(f"--draft-tokens must be at most {most} for {method}, given {given}")
    if args.trees and not any("speculative_token_tree" in METHODS[method].fields for method in args.methods):
        raise ValueError(
            f"--trees must be left out where no method has trees, given --methods {' '.join(args.methods)}"
        )


def _from_model(args: argparse.Namespace) -> str:
    """Those of ``--methods`` for which a model has to say what is drafted."""
    return " ".join(method for method in args.methods if method not in _FROM_TOKENS)


def _no_masks(methods: str) -> str:
    return f"for --methods {methods}: what it forbids to draft is not replayed. Other methods can do with it"


def _to_be_served(
    args: argparse.Namespace, lines: Sequence["TraceLine"]
) -> tuple[list["TraceLine"], dict[int, "SamplingParams"]]:
    """``lines``, without outputs where all are served again; and the parameters of those without, by their places.

    Raises:
        ValueError: something would not be done as it is asked for.
    """
    from compiled_llm.api.sampling_params import SamplingParams
    from compiled_llm.offline.serving import run_sampling, with_seed
    from compiled_llm.tuning import speculation

    config, given = engine_config(args), sampling_arguments(args)
    if args.serve_again:
        greedy = run_sampling(config, given)[0]["temperature"] == 0
        lines = speculation.to_be_served(lines, given.get("max_tokens"), greedy=greedy)
    rows = {place: line.row for place, line in enumerate(lines) if line.row is not None}
    if given.get("truncate_prompt_tokens") == -1 and len(rows) < len(lines):
        raise ValueError(
            "--truncate-prompt-tokens must be a number of tokens where the trace has outputs, given -1: how many "
            "tokens were left is not known"
        )
    sampling = run_sampling(config, given)[0] if rows else {}
    params = {}
    for place, row in rows.items():
        if row.lora is not None:
            raise ValueError(f"{row.name}: lora must be left out, as no adapters are served, given {row.lora!r}")
        try:
            made = SamplingParams(**{**sampling, **row.sampling})
        except ValueError as error:
            raise ValueError(f"{row.name}: {error}") from error
        from_model = _from_model(args)
        if from_model and made.masks_tokens:
            name = next(name for name in _MASKS if getattr(made, name))
            raise ValueError(f"{row.name}: {name} must be left out {_no_masks(from_model)}")
        params[place] = with_seed(made, config.seed, row.index)
    return list(lines), params


def _started(args: argparse.Namespace, drafting: Mapping[str, Any]) -> "CompiledEngine":
    """An engine with this ``speculative_config``, whose decode buckets are 1 and the ``--batch-sizes`` at least."""
    from compiled_llm.engine.engine import CompiledEngine

    config = engine_config(args)
    return CompiledEngine.from_config(
        dataclasses.replace(
            config,
            speculative_config=dict(drafting),
            bucket_sizes=config.bucket_sizes or tuple(sorted({1, *args.batch_sizes, args.max_num_seqs or 1})),
            wait_for_compile=True,
        )
    )


def _of_networks(
    program: str,
    args: argparse.Namespace,
    requests: Sequence["KnownRequest"],
    configs: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
) -> "Iterable[tuple[int, KnownDrafts | None]]":
    """What networks draft, with the places of those of ``configs`` that have one; None: its engine cannot start."""
    if not any(config["method"] in NETWORK_METHODS for config in configs):
        return ()
    from compiled_llm.tuning.draft_recording import of_networks

    def start(config: Mapping[str, Any]) -> "CompiledEngine | None":
        print(f"{program}: an engine starts with {json.dumps(config)}", flush=True)
        try:
            return _started(args, {**config, "adaptive": False})
        except ValueError as error:
            print(f"{program}: {json.dumps(config)} is left out, as its engine cannot start: {error}", flush=True)
            return None

    # One request at a time is what the table's "us" is of.
    return of_networks(start, requests, configs, sorted({1, *sizes}))


def _sizes(program: str, args: argparse.Namespace, num_requests: int) -> list[int]:
    """Those of ``--batch-sizes`` for which there are enough outputs that have a step to draft for.

    ``ValueError`` if there are none.
    """
    if not num_requests:
        raise ValueError("the outputs of a trace must have more than one token: there is no step to draft for")
    sizes = [size for size in args.batch_sizes if size <= num_requests]
    if len(sizes) < len(args.batch_sizes):
        left = ", ".join(str(size) for size in args.batch_sizes if size > num_requests)
        print(
            f"{program}: left out of --batch-sizes: {left}, more than the {num_requests} outputs of two tokens or more"
        )
    if not sizes:
        raise ValueError(f"--batch-sizes must have one of up to {num_requests}, the outputs of two tokens or more")
    return sizes


def _answered(
    engine: "CompiledEngine",
    args: argparse.Namespace,
    lines: Sequence["TraceLine"],
    params: Mapping[int, "SamplingParams"],
) -> list["KnownRequest"]:
    """All requests, after the engine has served those without an output, with ``params`` by their places."""
    from compiled_llm.offline.serving import run_sampling

    rows = [lines[place].row for place in params]
    answered: Iterator[list[KnownRequest]] = iter(())
    if rows:
        _, text = run_sampling(engine.config, sampling_arguments(args))
        print(f"{len(rows)} requests of the trace have no output, and are served first, with {text}")
        prompts: list[Any] = []
        for row in rows:
            assert row is not None
            prompts.append(row.prompt if row.messages is None else engine.encode_chat(row.messages, **row.chat_options))
        outputs = engine.generate(prompts, list(params.values()), use_tqdm=False)
        found = []
        for place, output in zip(params, outputs, strict=True):
            if output.outputs[0].finish_reason == "error":
                raise _UnansweredError(f"{lines[place].name}: {output.outputs[0].stop_reason}")
            pairs = [(one.token_ids, one.finish_reason == "length") for one in output.outputs]
            found.append(_requests_of(output.prompt_token_ids, pairs, params[place]))
        answered = iter(found)
    known = iter(_known(args, [line for line in lines if line.row is None], engine.config))
    return [request for line in lines for request in next(known if line.row is None else answered)]


def _known(args: argparse.Namespace, lines: Sequence["TraceLine"], config: EngineConfig) -> list[list["KnownRequest"]]:
    """The requests of each of ``lines``, which have their outputs."""
    from compiled_llm.api.sampling_params import SamplingParams
    from compiled_llm.offline.serving import run_sampling, with_seed

    encode, params = _tokenize(config, sampling_arguments(args)), SamplingParams()
    if lines and not set(args.methods) <= set(_FROM_TOKENS):
        sampling, text = run_sampling(config, sampling_arguments(args))
        print(f"outputs that the trace has are taken to be sampled with {text}")
        params = SamplingParams(**sampling)
    found = []
    for line in lines:
        assert line.prompt is not None
        found.append(_requests_of(encode(line.prompt), line.outputs, with_seed(params, config.seed, line.number)))
    return found


def _requests_of(
    prompt: Sequence[int], outputs: Sequence[tuple[Sequence[int], bool]], params: "SamplingParams"
) -> list["KnownRequest"]:
    """Of each continuation: its tokens, and whether it ended by its length. Empty ones are left out."""
    from compiled_llm.engine.admission import seed_of
    from compiled_llm.tuning.draft_replay import KnownRequest

    return [
        KnownRequest(prompt, tokens, ends_by_length, params, seed_of(params.seed or 0, number))
        for number, (tokens, ends_by_length) in enumerate(outputs)
        if tokens
    ]


def _tokenize(config: EngineConfig, given: Mapping[str, Any]) -> Callable[[str | Sequence[int]], Sequence[int]]:
    """What makes token ids of a prompt, with the sampling parameters that were ``given``.

    The tokenizer is loaded with the first text.
    """
    loaded: list[Any] = []
    split = given.get("split_special_tokens")
    if split is None:
        split = config.split_special_tokens

    def encode(prompt: str | Sequence[int]) -> Sequence[int]:
        from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer
        from compiled_llm.text.prompts import Capacity, encode_prompt

        if isinstance(prompt, str) and not loaded:
            loaded.append(load_tokenizer(config, checkpoint_directory(config, with_weights=False)))
            if loaded[0] is None:
                raise ValueError("the model has no tokenizer, and a prompt of the trace needs one: give --tokenizer")
        room = Capacity(2**31 - 1, "largest number of tokens")
        tokenizer = loaded[0] if loaded else None
        return encode_prompt(prompt, tokenizer, room, given.get("truncate_prompt_tokens"), split).token_ids

    return encode


def _lookup(text: str) -> tuple[int, int]:
    """``"1-3"`` -> its two numbers, for argparse."""
    if not re.fullmatch(r"[1-9]\d?-[1-9]\d?", text) or not 1 <= (pair := _pair(text))[0] <= pair[1] <= 16:
        raise argparse.ArgumentTypeError(f"must be MIN-MAX within 1-16, as 2-4, given {text!r}")
    return pair


def _pair(text: str) -> tuple[int, int]:
    least, most = text.split("-")
    return int(least), int(most)
