"""Layers with a state of a fixed size on the CPU: against the references, and bit for bit in any cut of a text."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from compiled_llm.ops import native
from tests.ops.in_rows import InRows
from tests.ops.instruction_sets import by_set, skip_without
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

KERNELS = native.load("recurrent_cpu")
ISAS = by_set("recurrent_cpu")
STEPS = {"mixed": MIXED, "decodes": DECODES, "one token": ONE, "chunk": CHUNK}
LARGE = (
    lambda dtype, tokens: gated_delta(dtype, tokens, 1, 2, 128, 128),
    lambda dtype, tokens: gated_delta(dtype, tokens, 1, 1, 64, 256),
)


def kernel(case: Case, isa: str | None = None) -> Callable[..., Tensor]:
    """It gets the states where an engine has them."""
    kernels, place = skip_without(KERNELS, isa or "portable"), case.order().index("state")

    def run(*args: Any) -> Tensor:
        rows = InRows([args[place]])
        out = kernels.run(case.name, *args[:place], *rows.copies, *args[place + 1 :], isa=isa)
        rows.put_back([args[place]])
        return out

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("requests", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("make", [*CASES.values(), *LARGE], ids=[*CASES, "Qwen3-Next", "values of 256"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_computes_what_the_reference_does(
    make: Callable, requests: tuple[Request, ...], dtype: torch.dtype, isa: str
) -> None:
    tokens, indices = step(requests)
    case = make(dtype, tokens)
    want = case.run(case.reference, indices)
    padding = [t for t in range(tokens) if not any(t in row for row in rows_with_tokens(indices))]
    unwritten = [*{*range(SLOTS)} - {slot for request in requests for _, slot in request.writes}]
    assert padding
    got = case.run(kernel(case, isa), indices)
    check(got, want, dtype)
    assert got[0][padding].eq(0).all()
    assert torch.equal(got[1][unwritten], case.state[unwritten])


def rows_with_tokens(indices: tuple[Tensor, ...]) -> list[range]:
    starts, lengths = indices[0].tolist(), indices[1].tolist()
    return [range(starts[r], starts[r + 1]) for r, length in enumerate(lengths) if length]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_text_has_the_same_bits_however_it_is_cut_into_steps(make: Callable, isa: str) -> None:
    """Random cuts, beside random companions, over slots that hold NaN before they are written."""
    text, random_numbers = 75, random.Random(0)
    case = make(torch.bfloat16, 2 * text)
    case = case._replace(state=torch.full_like(case.state, float("nan")))
    whole, states = case.run(kernel(case, isa), step([Request(text, 0, 5, ((text, 5),))], text)[1])

    for _ in range(4):
        state, done, slot, outs = case.state.clone(), 0, 1, []
        while done < text:
            count = random_numbers.choice([1, 1, 2, 17, 33, 40])
            count, to = min(count, text - done), random_numbers.choice([1, 2, 3])
            own = Request(count, done, slot, ((count, to),))
            others = [Request(random_numbers.randrange(5), 0, 9) for _ in range(random_numbers.randrange(3))]
            place = random_numbers.randrange(len(others) + 1)
            requests = [*others[:place], own, *others[place:]]
            first = sum(request.tokens for request in requests[:place])
            total, indices = step(requests, 0)
            # The companions have the tokens of the second half.
            rows = torch.randint(text, 2 * text, (total,), generator=torch.Generator().manual_seed(done))
            rows[first : first + count] = torch.arange(done, done + count)
            out = kernel(case, isa)(*case.arguments(indices, state, rows))
            outs.append(out[first : first + count])
            done, slot = done + count, to
        assert torch.equal(torch.cat(outs), whole[:text])
        assert torch.equal(state[slot], states[5])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_state_on_the_way_is_the_state_of_a_step_that_ends_there(make: Callable, isa: str) -> None:
    length = 70
    case = make(torch.float32, length)
    points = (1, 31, 32, 33, 64, 70)
    writes = tuple((after, slot) for slot, after in enumerate(points, start=2))
    _, states = case.run(kernel(case, isa), step([Request(length, 3, 1, writes)], 0)[1])
    for after, slot in writes:
        request = [Request(after, 3, 1, ((after, 1),))]
        _, alone = case.run(kernel(case, isa), step(request, 0)[1], tokens=slice(after))
        assert torch.equal(states[slot], alone[1])


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_slots_that_lie_apart_change_no_bit(make: Callable) -> None:
    tokens, indices = step(MIXED)
    case = make(torch.bfloat16, tokens)
    contiguous = case.run(getattr(torch.ops.compiled_llm, case.name), indices)
    for got, wanted in zip(case.run(kernel(case), indices), contiguous, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_threads_change_no_bit(make: Callable) -> None:
    tokens, indices = step(MIXED)
    case = make(torch.bfloat16, tokens)
    found = []
    for count in (1, 2, 9):
        torch.set_num_threads(count)
        found.append(case.run(kernel(case), indices))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_ops_are_registered_as_torch_expects(make: Callable) -> None:
    tokens, indices = step(MIXED)
    case = make(torch.float32, tokens)
    for name in (case.name, f"{case.name}_exact"):
        if hasattr(torch.ops.compiled_llm, name):
            torch.library.opcheck(
                getattr(torch.ops.compiled_llm, name),
                case.arguments(indices, case.state.clone()),
                test_utils=("test_schema", "test_faketensor"),
            )


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_wrong_kernel_would_be_found(make: Callable) -> None:
    """What the comparison is worth: a state from another slot, a forgotten write, one too early."""
    tokens, indices = step(MIXED)
    case = make(torch.float32, tokens)
    want = case.run(case.reference, indices)
    changes = ((2, lambda x: (x + 1) % SLOTS), (3, torch.zeros_like), (4, lambda x: x.clamp(max=1)))
    for number, changed in changes:
        wrong = [changed(x) if i == number else x for i, x in enumerate(indices)]
        with pytest.raises(AssertionError):
            check(case.run(case.reference, wrong), want, torch.float32)


def refusal(change: Callable[[dict], None], make: Callable[[], Case]) -> None:
    case = make()
    given = dict(zip(case.order(), case.arguments(step(MIXED)[1], case.state), strict=True))
    change(given)
    getattr(torch.ops.compiled_llm, case.name)(*given.values())


def replace(**values: object) -> Callable[[dict], None]:
    return lambda given: given.update({name: x(given[name]) if callable(x) else x for name, x in values.items()})


TOKENS = step(MIXED)[0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (replace(weight=torch.ones(40, 9)), ValueError, "width must be from 2 to 8, got 9"),
        (replace(state=lambda s: s.double()), ValueError, "short_convolution: state must be .* of float32"),
        (replace(x=lambda x: x.t().contiguous().t()), ValueError, "last stride of x must be 1"),
        (replace(x=lambda x: x.double()), ValueError, "dtype must be float32, bfloat16 or float16"),
        (replace(gate_after=torch.ones(1, 40)), ValueError, "gate_after must be"),
        (replace(write_slot=lambda x: x + SLOTS), IndexError, r"write_slot\[0, 0\] is 15, outside the 12 slots"),
        (replace(read_slot=lambda x: x - 4), IndexError, r"read_slot\[0\] is -1, outside"),
        (replace(write_after=lambda x: x + 1), IndexError, r"write_after\[0, 0\] is 2, but request 0 has 1 tokens"),
        (replace(query_start_loc=lambda x: x * 2), IndexError, "must start at 0 and end at or below"),
        (replace(seq_lens=lambda x: x.long()), ValueError, r"seq_lens must be \[7\] of int32"),
    ],
)
def test_convolution_refuses_by_name(change: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        refusal(change, lambda: convolution(torch.float32, TOKENS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace(state=lambda s: s.half()), "state must be .* of float32"),
        (replace(A_log=torch.ones(3)), r"A_log must be \[2\]"),
        (replace(state=lambda s: s.mT.contiguous().mT), "state must have contiguous slots"),
        (replace(b=lambda b: b.half()), r"b must be \[\d+, 2\] of float32"),
        (replace(v=lambda v: v[:, :1].expand(-1, 3, -1)), "state must be"),
        (replace(k=lambda k: k.transpose(1, 2).contiguous().transpose(1, 2).expand(-1, 2, -1)), "k must be"),
        (replace(q=lambda q: q.repeat(1, 3, 1)), "multiple of that of key heads, got 2 and 3"),
    ],
)
def test_delta_rule_refuses_by_name(change: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refusal(change, lambda: gated_delta(torch.float32, TOKENS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace(state=lambda s: s.transpose(2, 3).contiguous()), "state must be"),
        (replace(D=torch.ones(2).half()), r"D must be \[2\] of float32"),
        (replace(C=lambda c: c[:, :, 1:]), "C must be"),
        (replace(x=lambda x: x.repeat(1, 2, 1)[:, :3], B=lambda b: b.repeat(1, 2, 1)), "multiple of that of groups"),
        (replace(dt_max=-1.0), "dt_min must be at most dt_max, got 0 and -1"),
    ],
)
def test_scan_refuses_by_name(change: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refusal(change, lambda: mamba2(torch.float32, TOKENS))


# ---- transformers ----------------------------------------------------------------------------------------------------


def whole_and_decode(case: Case, before: int) -> Tensor:
    """A request's first tokens in one step, and its last one as a decode."""
    tokens, state = before + 1, case.state.clone()
    op = kernel(case)
    first = op(*case.arguments(step([Request(before, 0, 0, ((before, 3),))], 0)[1], state, slice(before)))
    last = op(*case.arguments(step([Request(1, before, 3, ((1, 3),))], 0)[1], state, slice(before, tokens)))
    return torch.cat([first, last])


def test_delta_rule_as_transformers_have_it() -> None:
    case = gated_delta(torch.float32, 41, 2, 4, 32, 64)
    got = whole_and_decode(case, 40)
    inputs, weights = case.inputs, case.weights
    g = -weights["A_log"].exp() * torch.nn.functional.softplus(inputs["a"] + weights["dt_bias"])
    want, _ = torch_recurrent_gated_delta_rule(
        *(inputs[name][None] for name in "qkv"),
        g=g[None],
        beta=inputs["b"].sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(got, want[0], atol=2e-6, rtol=2e-5)


def test_scan_as_transformers_have_it() -> None:
    case = mamba2(torch.float32, 41, 4, 16, 2, 32)
    inputs, weights = case.inputs, case.weights
    want = mamba2_chunk_scan(
        inputs["x"][None], inputs["dt"][None], -weights["A_log"].exp(), inputs["B"][None], inputs["C"][None],
        chunk_size=16, D=weights["D"], dt_bias=weights["dt_bias"], dt_softplus=True,
    )  # fmt: skip
    torch.testing.assert_close(whole_and_decode(case, 40), want[0], atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_convolution_as_transformers_have_it(bias: bool) -> None:
    case = convolution(torch.float32, 21, 48, 4, bias=bias)
    want = causal_conv1d_fn(case.inputs["x"].t()[None], case.weights["weight"], case.weights["bias"], activation="silu")
    torch.testing.assert_close(whole_and_decode(case, 20), want[0].t(), atol=2e-6, rtol=2e-5)


def test_convolution_of_lfm2() -> None:
    case = convolution(torch.float32, 21, 48, 3, silu=False, gates=True)
    layer = Lfm2ShortConv(Lfm2Config(hidden_size=48, conv_L_cache=3, conv_bias=False, num_hidden_layers=1), 0)
    x, before, after = (case.inputs[name] for name in ("x", "gate_before", "gate_after"))
    layer.in_proj = torch.nn.Identity()
    layer.out_proj = torch.nn.Identity()
    layer.conv.weight.data = case.weights["weight"][:, None]
    with torch.no_grad():
        want = layer(torch.cat([before, after, x], dim=1)[None])
    torch.testing.assert_close(whole_and_decode(case, 20), want[0], atol=2e-6, rtol=2e-5)
