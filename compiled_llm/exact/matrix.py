"""The same requests in a matrix of settings, and all that their steps compute, bit for bit.

A new kind of KV cache, a shape of buckets or a way to be short of memory is a line of a table here. Families and kinds
of linear layer come with the model and its dtype.
"""

import dataclasses
import functools
import itertools
import random
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.text.tokenizer import Tokenizer

# What is compiled.
SIZES: dict[str, dict[str, Any]] = {
    "1 or 8 rows, 64 tokens": {"bucket_sizes": (1, 8), "token_bucket_sizes": (64,)},
    "1 row, 512 tokens": {"bucket_sizes": (1,), "token_bucket_sizes": (512,)},
    "3 or 20 rows, 24 or 96 tokens": {"bucket_sizes": (3, 20), "token_bucket_sizes": (24, 96), "block_size": 32},
    "default": {},
}
QUICK_SIZES = tuple(SIZES)[:1]

# How requests are scheduled: nothing is compiled anew for these. Under "priority" the pool holds little more than the
# longest request, and each request that arrives is more urgent than those before: so it preempts them.
_PRIORITY = {"scheduling_policy": "priority", "max_num_batched_tokens": 48}
WAYS: dict[str, dict[str, Any]] = {
    "not preempted": {},
    "recomputed": {**_PRIORITY, "preemption_mode": "recompute"},
    "swapped": {**_PRIORITY, "preemption_mode": "swap", "swap_space_bytes": 2**28, "async_scheduling": True},
}
STEPS_BETWEEN = 2  # arrivals
COMPANIES = ("alone", "together")

# Prompt lengths at, before and after the ends of blocks and chunks. Every third shares a beginning with the longer of
# the two before it: 540 tokens with 600, more than a partition of attention (512 keys).
LENGTHS = (40, 17, 130, 1, 64, 97, 600, 65, 540, 16, 33, 48, 150, 31, 200, 2, 128, 129, 15, 63)

KINDS = ("hidden states", "logits", "tokens", "log-probabilities", "prompt log-probabilities")


class Request(NamedTuple):
    token_ids: list[int]
    params: SamplingParams
    adapter: LoRARequest | None = None


class Place(NamedTuple):
    """Something that is computed of a request: after its token at ``position``, ``KINDS[kind]``."""

    position: int
    kind: int

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} at position {self.position}"


# What was computed at each place. One value, but where a preempted request computed it again and otherwise.
Record = dict[Place, frozenset]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to serve the requests: a name of each table above.

    Attributes:
        warm: whether all were served before, and the prefix cache is kept.
    """

    kv_cache: str
    sizes: str
    way: str
    compiled: bool
    company: str
    warm: bool

    def __str__(self) -> str:
        compiled, warm = "compiled" if self.compiled else "eager", "warm" if self.warm else "cold"
        return f"KV cache {self.kv_cache}: {self.sizes}, {compiled}, {self.company}, {warm}, {self.way}"

    @property
    def engine(self) -> "Setting":
        """The first setting of those that one engine serves."""
        return dataclasses.replace(self, company=COMPANIES[0], warm=False)

    def arguments(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Engine arguments, with a KV pool that suits ``requests``."""
        arguments = {**SIZES[self.sizes], **WAYS[self.way], "kv_cache_dtype": self.kv_cache}
        block_size = arguments.get("block_size", 16)
        blocks = [-(-(len(ids) + (params.max_tokens or 0)) // block_size) for ids, params, _ in requests]
        arguments["num_kv_blocks"] = sum(blocks) if self.way == "not preempted" else max(blocks) + 1
        return arguments | {"enforce_eager": not self.compiled}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A setting compared with the reference.

    Attributes:
        reference: the setting that it is compared with.
        requests: how many were served.
        compared: places by kind.
        differing: index of a request -> the first place where it differs.
        preemptions, cached_tokens: in this setting: that it was what its name says.
        reloads: how often the engine had copied an adapter to a slot again; None: there are too few for that.
    """

    setting: Setting
    reference: Setting
    requests: int
    compared: Mapping[str, int]
    differing: Mapping[int, Place]
    preemptions: int
    cached_tokens: int
    reloads: int | None = None

    @property
    def missing(self) -> str | None:
        """What the setting should have led to and did not."""
        if self.setting.way != "not preempted" and not self.preemptions:
            return "nothing was preempted"
        if self.setting.warm and not self.cached_tokens:
            return "nothing was found in the prefix cache"
        if self.setting.way == "not preempted" and self.reloads == 0:
            return "no adapter was evicted and loaded again"
        return None


def settings_of(kv_caches: Sequence[str], sizes: Sequence[str], modes: Sequence[bool]) -> list[Setting]:
    """All settings, those of an engine side by side; the first of a KV cache is the reference.

    ``modes``: whether compiled.
    """
    return [
        Setting(kv_cache, size, way, compiled, company, warm)
        for kv_cache, compiled, size, way in itertools.product(kv_caches, modes, sizes, WAYS)
        for company, warm in itertools.product(COMPANIES, (False, True))
        # A request that runs alone is never preempted.
        if way == "not preempted" or (SIZES[size].get("bucket_sizes") != (1,) and company == "together" and not warm)
    ]


def make_requests(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    count: int,
    num_tokens: int,
    max_len: int,
    seed: int = 0,
    adapters: Sequence[LoRARequest] = (),
) -> list[Request]:
    """Prompts of Python's standard library, or of random tokens without a tokenizer.

    Half of the requests are greedy, the others seeded; some have penalties, some ask for log-probabilities of prompts.
    They have no adapter and each of ``adapters`` in turn, also where prompts begin alike.
    """
    of_turn = [None, *adapters]
    rng = random.Random(seed)
    lengths = [min(LENGTHS[i % len(LENGTHS)], max_len - num_tokens) for i in range(count)]
    text = _library_tokens(tokenizer, 20 * max(lengths)) if tokenizer else []
    requests: list[Request] = []
    for i, length in enumerate(lengths):
        start = rng.randrange(max(1, len(text) - length))
        ids = text[start : start + length] if text else [rng.randrange(vocab_size) for _ in range(length)]
        if i % 3 == 2:
            before = max(requests[-2:], key=lambda request: len(request.token_ids)).token_ids
            shared = min(len(before), length - 1) - rng.randrange(3)
            ids = before[:shared] + ids[shared:]
        options: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 3, "detokenize": False}
        if i % 2:
            options |= {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": i}
        if i % 4 == 3:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.3}
        if i % 5 == 2:
            options |= {"prompt_logprobs": 2}
        params = SamplingParams(**{"temperature": 0.0} | options)
        requests.append(Request(ids, params, of_turn[i % len(of_turn)]))
    return requests


def _library_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """At least ``count`` tokens of the standard library's files, if it has so many."""
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(found) >= count:
            break
        found += tokenizer.encode_piece(path.read_text(encoding="utf-8", errors="replace"))
    return found


# -- Serving and recording


@functools.cache
def _multipliers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)  # odd: so a change of one element alone always changes the sum


_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_digests(rows: Tensor) -> list[int]:
    """For each row of ``[N, ...]``, any dtype, 64 bits that follow from its bits: a sum of products modulo 2**64."""
    if rows.numel() == 0:
        return [0] * len(rows)
    lanes = rows.contiguous().flatten(1) if rows.dim() > 1 else rows.contiguous()[:, None]
    lanes = lanes.view(_LANES[rows.itemsize]).long()
    return (lanes * _multipliers(lanes.shape[1], lanes.device)).sum(1).tolist()


class StepRecorder:
    """Records all that an engine's steps compute, and what it returns.

    ``records``: by request id. ``reloads``: adapters that were copied to a slot, and had been before.
    """

    def __init__(self, engine: CompiledEngine) -> None:
        self.reloads, self._loaded = 0, set[str]()
        self.records: defaultdict[str, Record] = defaultdict(dict)
        self._steps = engine.own_runner.steps
        engine.own_runner.watch = self

    def __call__(self, output: SchedulerOutput, bucket: Bucket, run: Callable[[], Tensor]) -> Tensor:
        for _, adapter in output.adapter_loads:
            self.reloads += adapter in self._loaded
            self._loaded.add(adapter)
        logits = run()
        hidden = iter(row_digests(self._steps.hidden[: output.num_tokens]) if self._steps.has_all_rows else ())
        rows = row_digests(logits[: len(output.request_ids)])
        columns = zip(output.request_ids, output.num_computed_tokens, output.num_scheduled_tokens, rows, strict=True)
        for request_id, start, count, row in columns:
            record = self.records[request_id.name]
            for position, digest in zip(range(start, start + count), hidden, strict=False):
                _note(record, position, "hidden states", digest)
            _note(record, start + count - 1, "logits", row)
        return logits

    def finish(self, output: RequestOutput) -> Record:
        """The whole record of a request that has ended."""
        record, completion = self.records.pop(output.request_id), output.outputs[0]
        if completion.finish_reason != "length":
            raise ValueError(f"a request ended with {completion.finish_reason!r}: {completion.stop_reason}")
        first = len(output.prompt_token_ids) - 1
        for position, (token, logprobs) in enumerate(
            zip(completion.token_ids, completion.logprobs or (), strict=True), first
        ):
            _note(record, position, "tokens", token)
            _note(record, position, "log-probabilities", _bits(logprobs))
        for position, prompt_logprobs in enumerate((output.prompt_logprobs or [])[1:]):
            _note(record, position, "prompt log-probabilities", _bits(prompt_logprobs))
        return record


def _note(record: Record, position: int, kind: str, value: Any) -> None:
    place = Place(position, KINDS.index(kind))
    record[place] = record.get(place, frozenset()) | {value}


def _bits(logprobs: Any) -> str:
    """As text that tells all floats apart, in their order."""
    return repr([(token_id, one.logprob, one.rank) for token_id, one in logprobs.items()])


def batches(company: str, count: int) -> list[tuple[int, ...]]:
    """Indices of the requests that are served at the same time, one batch after another."""
    return [tuple(range(count))] if company == "together" else [(index,) for index in range(count)]


def serve(engine: CompiledEngine, requests: Sequence[Request], indices: Sequence[int]) -> dict[int, RequestOutput]:
    """Serve some of the requests at once, in this order; their ids are their indices.

    Under "priority" they arrive one after another.
    """
    apart = STEPS_BETWEEN if engine.config.scheduling_policy == "priority" else 0
    outputs: dict[int, RequestOutput] = {}
    for urgency, index in enumerate(indices):
        prompt, params, adapter = requests[index]
        priority = -urgency if apart else 0
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params, priority, lora_request=adapter)
        outputs |= _steps(engine, apart)
    while engine.has_unfinished_requests():
        outputs |= _steps(engine, 1)
    return outputs


def _steps(engine: CompiledEngine, count: int) -> dict[int, RequestOutput]:
    return {int(output.request_id): output for _ in range(count) for output in engine.step()}


class Served(NamedTuple):
    """What came of a setting. ``reloads``: as that of ``Outcome``."""

    setting: Setting
    records: dict[int, Record]
    preemptions: int
    cached_tokens: int
    reloads: int


def serve_settings(
    engine: CompiledEngine, settings: Sequence[Setting], requests: Sequence[Request]
) -> Iterator[Served]:
    """Serve the requests in each of an engine's settings. With a warm cache they come in the other order.

    With a cold one steps keep the hidden states of all tokens, for which these are compared; else those that they need.
    """
    recorder = StepRecorder(engine)
    for company in dict.fromkeys(setting.company for setting in settings):
        warmths = [setting.warm for setting in settings if setting.company == company]
        found: dict[bool, dict[int, Record]] = {warm: {} for warm in warmths}
        counts: Counter[tuple[bool, str]] = Counter()
        for batch in batches(company, len(requests)):
            engine.reset_prefix_cache()
            for warm in warmths:
                before = engine.stats()
                engine.own_runner.steps.keeps_all_rows = not warm
                outputs = serve(engine, requests, batch[::-1] if warm else batch)
                gained = engine.stats().since(before)
                counts[warm, "preemptions"] += gained.num_preemptions
                counts[warm, "reloads"] = recorder.reloads
                counts[warm, "cached"] += sum(output.num_cached_tokens for output in outputs.values())
                found[warm] |= {index: recorder.finish(output) for index, output in outputs.items()}
        for setting in settings:
            if setting.company == company:
                warm = setting.warm
                gained_in = [counts[warm, what] for what in ("preemptions", "cached", "reloads")]
                yield Served(setting, found[warm], *gained_in)


def compare(reference: Mapping[int, Record], ours: Mapping[int, Record]) -> tuple[Counter[str], dict[int, Place]]:
    """Places by kind at which both have something, and for each request that differs the first place."""
    compared: Counter[str] = Counter()
    differing: dict[int, Place] = {}
    for index, record in ours.items():
        places = sorted(record.keys() & reference[index].keys())
        compared.update(KINDS[place.kind] for place in places)
        first = next((place for place in places if record[place] != reference[index][place]), None)
        if first is not None:
            differing[index] = first
    return compared, differing


def run_matrix(
    settings: Sequence[Setting], requests: Sequence[Request], make_engine: Callable[[Setting], CompiledEngine]
) -> Iterator[Outcome]:
    """Serve and compare all settings; each with the first setting of the same KV cache, which has no outcome."""
    references: dict[str, tuple[Setting, dict[int, Record]]] = {}
    may_reload = len({request.adapter for request in requests} - {None}) > 1
    for _, group in itertools.groupby(settings, key=lambda setting: setting.engine):
        of_engine = list(group)
        with make_engine(of_engine[0]) as engine:
            for setting, records, preemptions, cached, reloads in serve_settings(engine, of_engine, requests):
                reference, theirs = references.setdefault(setting.kv_cache, (setting, records))
                if reference is setting and theirs is records:
                    continue
                compared, differing = compare(theirs, records)
                again = reloads if may_reload else None
                yield Outcome(setting, reference, len(records), compared, differing, preemptions, cached, again)
