"""The Triton kernels of layers with a state without a GPU: run in Triton's interpreter, and compiled ahead of time."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.recurrent import triton_convolution, triton_gated_delta, triton_mamba2
from compiled_llm.ops.recurrent.triton_delta_chunks import most_chunks
from tests.ops import ahead_of_time, interpreted
from tests.ops.recurrent.recurrent_cases import (
    CASES,
    CHUNK,
    DECODES,
    DTYPES,
    MIXED,
    ONE,
    SLOTS,
    Case,
    Request,
    check,
    convolution,
    gated_delta,
    mamba2,
    step,
)

MODULES = {
    "short_convolution": triton_convolution, "gated_delta_rule": triton_gated_delta, "mamba2_scan": triton_mamba2,
}  # fmt: skip
LONG = (Request(21, 0, 4, ((21, 4), (1, 2), (2, 3))), Request(20, 3, 5, ((1, 5), (2, 1), (20, 6))))
# Beside short ones: chunks of 64 and what is left, states inside of a chunk, at its ends and at the end of the request.
SEVERAL = (
    Request(1, 5, 3, ((1, 3),)),
    Request(150, 12, 5, ((65, 2), (128, 7), (150, 5))),
    Request(2, padding=True),
    Request(7, 4, 1, ((2, 4), (7, 1), (5, 6))),
    Request(64, 0, 8, ((64, 8), (1, 9))),
)
STEPS = {"mixed": MIXED, "decodes": DECODES, "one token": ONE, "long": LONG}


def kernel(case: Case, *, exact: bool = False) -> Callable[..., Tensor]:
    function = getattr(MODULES[case.name], case.name)
    return functools.partial(function, exact=True) if exact and case.name != "short_convolution" else function


# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(make: Callable, requests: tuple[Request, ...], dtype: torch.dtype) -> None:
    tokens, indices = step(requests)
    case = make(dtype, tokens)
    want = case.run(case.reference, indices)
    check(case.run(kernel(case, exact=True), indices), want, dtype)
    got = case.run(kernel(case), indices)
    states = {"mamba2_scan": 2e-3, "gated_delta_rule": 3e-5}.get(case.name, 1e-5)  # of those by chunks
    check(got, want, dtype, states=1e-5 if dtype == torch.float32 else states)
    unwritten = [*{*range(SLOTS)} - {slot for request in requests for _, slot in request.writes}]
    assert torch.equal(got[1][unwritten], case.state[unwritten])


def a_text_has_the_same_bits_however_it_is_cut(make: Callable) -> None:
    text = 20
    case = make(torch.bfloat16, text)
    case = case._replace(state=torch.full_like(case.state, float("nan")))
    whole, states = case.run(kernel(case, exact=True), step([Request(text, 0, 5, ((text, 5), (13, 6)))], 0)[1])
    for cuts in ((1, 1, 1, 10, 7), (13, 7)):
        state, done, outs = case.state.clone(), 0, []
        for count in cuts:
            indices = step([Request(count, done, 1, ((count, 1),))], 0)[1]
            outs.append(kernel(case, exact=True)(*case.arguments(indices, state, slice(done, done + count))))
            done += count
            if done == 13:
                assert torch.equal(state[1], states[6])
        assert torch.equal(torch.cat(outs), whole)
        assert torch.equal(state[1], states[5])


def chunks_agree_with_the_reference() -> None:
    tokens, indices = step(SEVERAL)
    case = gated_delta(torch.bfloat16, tokens, 1, 2, 21, 18)
    got = case.run(kernel(case), indices)
    check(got, case.run(case.reference, indices), torch.bfloat16, states=3e-5)
    unwritten = [*{*range(SLOTS)} - {slot for request in SEVERAL for _, slot in request.writes}]
    assert torch.equal(got[1][unwritten], case.state[unwritten])


def repeated_keys_agree_with_the_reference() -> None:
    """The system of such a chunk is as far from the unit matrix as it can be, and powers of it are huge."""
    tokens, indices = step((Request(100, 7, 5, ((100, 5), (64, 2))),))
    case = gated_delta(torch.bfloat16, tokens, 1, 2, 16, 32)
    same = case.inputs["k"][:1].expand_as(case.inputs["k"]).contiguous()
    gates = {"a": torch.full_like(case.inputs["a"], -20.0), "b": torch.full_like(case.inputs["b"], 6.0)}
    case = case._replace(inputs={**case.inputs, "k": same, **gates})
    check(case.run(kernel(case), indices), case.run(case.reference, indices), torch.bfloat16, states=1e-4)


def every_chunk_is_some_request_s() -> None:
    """Of steps whose requests are just too long, or just long enough, for as many programs as there are."""
    for counts in ((17,) * 5, (65, 16, 0, 64), (16, 15)):
        tokens, indices = step([Request(count, 0, 1, ((count, n + 1),)) for n, count in enumerate(counts)], 0)
        assert sum(-(-count // 64) for count in counts if count > 16) <= most_chunks(tokens, len(counts))
        case = gated_delta(torch.bfloat16, tokens, 1, 1, 16, 16)
        check(case.run(kernel(case), indices), case.run(case.reference, indices), torch.bfloat16, states=3e-5)


def no_tokens_are_no_launch(make: Callable) -> None:
    case = make(torch.float32, 0)
    for requests in ((), (Request(0, 3, 1),)):
        rows = [torch.zeros(len(requests) + 1), torch.zeros(len(requests)), torch.zeros(len(requests))]
        indices = [x.int() for x in (*rows, *torch.zeros(2, len(requests), 1))]
        out, state = case.run(kernel(case), indices)
        assert out.numel() == 0
        assert torch.equal(state, case.state)


INTERPRETED = {
    "scan by chunks-bfloat16": functools.partial(agrees_with_the_reference, CASES["scan"], CHUNK, torch.bfloat16),
    "delta rule by chunks-bfloat16": chunks_agree_with_the_reference,
    "delta rule by chunks, one key again and again": repeated_keys_agree_with_the_reference,
    "delta rule by chunks of any number of requests": every_chunk_is_some_request_s,
}
for title, make in CASES.items():
    INTERPRETED[f"{title}-cut"] = functools.partial(a_text_has_the_same_bits_however_it_is_cut, make)
    INTERPRETED[f"{title}-none"] = functools.partial(no_tokens_are_no_launch, make)
    for name, requests in STEPS.items():
        for dtype in DTYPES if name == "mixed" else DTYPES[:1]:
            agrees = functools.partial(agrees_with_the_reference, make, requests, dtype)
            INTERPRETED[f"{title}-{name}-{str(dtype)[6:]}"] = agrees


# ---- launched as one binary -----------------------------------------------------------------------------------------


def recorded_launches(
    case: Case, requests: tuple[Request, ...], *, exact: bool, capability: tuple[int, int] = (9, 0)
) -> list[ahead_of_time.Launch]:
    tokens, indices = step(requests, 0)
    with ahead_of_time.recorded(capability, MODULES[case.name]) as launches:
        case.run(kernel(case, exact=exact), indices, tokens=slice(tokens))
    return launches


LARGE = {
    "convolution of Qwen3-Next": lambda dtype, tokens: convolution(dtype, tokens, 8192, 4),
    "convolution of LFM2": lambda dtype, tokens: convolution(dtype, tokens, 2048, 3, silu=False, gates=True),
    "convolution of Granite 4": lambda dtype, tokens: convolution(dtype, tokens, 3328, 4, bias=True),
    "delta rule of Qwen3-Next": lambda dtype, tokens: gated_delta(dtype, tokens, 2, 4, 128, 128),
    "delta rule, 64 by 256": lambda dtype, tokens: gated_delta(dtype, tokens, 2, 2, 64, 256),
    "scan of Granite 4": lambda dtype, tokens: mamba2(dtype, tokens, 4, 64, 1, 128),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_decodes_and_chunks_run_one_binary(make: Callable) -> None:
    """Of a kernel that has sums: how they lie in threads follows from what Triton specialises by."""
    case, seen = make(torch.bfloat16, 32), set()
    for requests in (ONE, (*ONE, *ONE), (Request(16, 0, 1, ((16, 1),)),), (Request(31, 0, 1, ((31, 1),)),)):
        for launched, args, kwargs in recorded_launches(case, requests, exact=True):
            if case.name != "short_convolution":
                given = zip(launched.params, args, strict=False)
                by = [None if parameter.do_not_specialize else value for parameter, value in given]
                seen.add((launched, ahead_of_time.specialisation(tuple(by)), tuple(kwargs.items())))
    assert len(seen) == (case.name != "short_convolution")


# ---- registered -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_gpu_runs_the_triton_kernel(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would call for tensors of a GPU, called with those of a CPU."""
    tokens, indices = step(ONE)
    case, calls = make(torch.float32, tokens), []
    stands_in = lambda *args, exact=False: calls.append(case.name) or case.reference(*args)  # noqa: E731
    monkeypatch.setattr(MODULES[case.name], case.name, stands_in)
    names = [name for name in (case.name, f"{case.name}_exact") if hasattr(torch.ops.compiled_llm, name)]
    for name in names:
        op = getattr(torch.ops.compiled_llm, name).default
        op._op_dk(torch._C.DispatchKey.CUDA, *case.arguments(indices, case.state.clone()))
    assert calls == [case.name] * len(names)


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


ALL = tuple(LARGE)
COMPILED = [
    ((9, 0), torch.bfloat16, ALL), ((8, 0), torch.float16, ALL), ((8, 0), torch.bfloat16, ALL),
    ((10, 0), torch.bfloat16, ALL), ((9, 0), torch.float32, ALL),
]  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "dtype", "titles"),
    [
        ((9, 0), torch.bfloat16, ("convolution of LFM2",)),
        *(pytest.param(*case, marks=pytest.mark.battery) for case in COMPILED),
    ],
    ids=str,
)
def test_compiles_without_spills(capability: tuple[int, int], dtype: torch.dtype, titles: tuple[str, ...]) -> None:
    for title in titles:
        case = LARGE[title](dtype, 32)
        chunk = (Request(32, 0, 1, ((32, 1),)),)
        for requests, exact in ((DECODES, True), (chunk, False)):
            for launch in recorded_launches(case, requests, exact=exact, capability=capability):
                binary, _ = ahead_of_time.without_spills(launch, capability)
                fuses = launch[2].get("enable_fp_fusion", True)
                assert fuses or ".fma" not in binary.asm["ptx"], f"{title}: fused by choice of the compiler"


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (convolution, "weight", torch.ones(40, 9), "width must be from 2 to 8, got 9"),
        (convolution, "state", torch.ones(3, 4, 40), r"state must be a contiguous \[3, 3, 40\]"),
        (convolution, "gate_before", torch.ones(40, 22).t(), "gate_before must be .* with the last stride 1"),
        (gated_delta, "k", torch.ones(22, 2, 16), r"k must be \[22, 1, 16\]"),
        (gated_delta, "A_log", torch.ones(2).half(), r"A_log must be a contiguous \[2\] of torch.float32"),
        (gated_delta, "seq_lens", torch.ones(7), "seq_lens must be .* of torch.int32"),
        (mamba2, "C", torch.ones(22, 1, 15), r"C must be \[22, 1, 16\]"),
        (mamba2, "dt_max", -1.0, "dt_min must be at most dt_max"),
        (mamba2, "x", torch.ones(22, 2, 8).double(), "dtype must be float32"),
    ],
)
def test_refuses_by_name(make: Callable, name: str, value: object, message: str) -> None:
    tokens, indices = step(MIXED)
    case = make(torch.float32, tokens)
    given = dict(zip(case.order(), case.arguments(indices, case.state), strict=True)) | {name: value}
    with pytest.raises(ValueError, match=message):
        kernel(case)(*given.values())


ORDINARY = [
    "convolution of 150 channels, bias-mixed-float32", "convolution-cut", "delta rule-mixed-bfloat16",
    "delta rule-none", "scan-mixed-float16", "scan by chunks-bfloat16",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
