"""What adapters change, inside a layer's launch: the bits of launches of its own, in Triton's interpreter; compiled
ahead of time.
"""

import contextlib
import functools
import importlib.util
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import (
    triton_adapted,
    triton_linear,
    triton_lora,
    triton_quantize_rows,
    triton_quantized,
    triton_quantized_a8,
)
from compiled_llm.ops.linear.product_choices import num_counters
from compiled_llm.ops.linear.quantized_weight_gpu import empty_quantized_gpu
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.linear.triton_linear import exact_linear
from compiled_llm.ops.programmatic_launch import programmatic_launches
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import PROGRAM_MEMORY, empty, floats, integers
from tests.ops.linear.test_lora import weights
from tests.ops.linear.test_triton_surroundings import EPS, FORMS, KINDS, by_single_ops, drawn, layer_of

# ---- interpreted ----------------------------------------------------------------------------------------------------

PARTS = {"one": (42,), "whole tiles": (16, 16, 10), "cut tiles": (7, 30, 5)}
ROWS = 18
STEPS = (  # slots of a step's rows, again and again; how many rows; those of a launch
    ((0, 2, 3, 1, 0), ROWS, (slice(3, 4), slice(1, 8), slice(0, ROWS))),
    ((2,), 2, (slice(0, 2),)),
    ((0,), 1, (slice(0, 1),)),
)


def has_the_bits_of_a_launch_of_its_own(
    kind: str, parts: tuple[int, ...], around: dict[str, Any] | None = None
) -> None:
    """Rows of all slots, of one and of none, one and many; ranks that differ, with NaN behind them."""
    around = around or {}
    gated = "activation" in around
    layer, w = layer_of(kind, 42, 100, bias=True), weights(parts, 100, 20, torch.bfloat16)
    x, flags = drawn(ROWS, 100, seed=3).bfloat16(), torch.zeros(2, dtype=torch.int32)
    added = {name: drawn(ROWS, 21 if gated else 42, seed=5).bfloat16() for name in ("residual",) if name in around}
    norm = (1 + drawn(100, seed=4) / 4).bfloat16() if around.get("norm") else None
    given = Surroundings(**{**around, **added, "norm": norm, "eps": EPS})
    for some, count, launches in STEPS:
        slots = torch.tensor((some * count)[:count], dtype=torch.int32)

        def apart(x: Tensor, *surroundings: Any, slots: Tensor = slots) -> Tensor:
            y = layer(x)
            triton_lora.add_lora(y, x, slots, *w)
            return y

        cut = {name: tensor[:count] for name, tensor in added.items()}
        whole = by_single_ops(apart, x[:count], given._replace(**cut))
        for rows in launches:
            own = given._replace(**{name: tensor[rows] for name, tensor in added.items()})
            assert torch.equal(layer(x[rows], *own._replace(lora=(slots[rows], *w, flags))), whole[rows])
            assert not flags.any(), "left for the next launch"


def parts_of_the_inputs_are_expanded_once(outputs: int = 40, inputs: int = 1536) -> None:
    """Where several programs have a sum, the last one of a tile waits and counts."""
    w, flags = weights((outputs,), inputs, 16, torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    x, weight = drawn(18, inputs, seed=1).bfloat16(), drawn(outputs, inputs, seed=2).bfloat16()
    slots = torch.randint(0, 4, (18,), dtype=torch.int32)
    counters = torch.zeros(num_counters(outputs, inputs), dtype=torch.int32)
    assert len(counters)
    want = exact_linear(x, weight, None)
    triton_lora.add_lora(want, x, slots, *w)
    around = Surroundings(lora=(slots, *w, flags)).following
    for _ in range(2):
        assert torch.equal(exact_linear(x, weight, None, counters, *around), want)
        assert not flags.any()


class _Waits(BaseException):
    """A program would have to wait for another one: no error, which the interpreter would wrap."""


@contextlib.contextmanager
def in_order(backwards: bool) -> Iterator[None]:
    """The programs of a launch run in that order; one that waits begins again when another one has ended."""
    from triton.runtime import interpreter

    builder, put_off, looks = interpreter.interpreter_builder, list[tuple[int, dict]](), 0
    made, atomic = interpreter.GridExecutor.__init__, interpreter.InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self: Any, op: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        nonlocal looks
        looks += not value.data.any()  # nothing is added: it looks at a flag, and waits if it looks again
        if looks > 1:
            raise _Waits
        return atomic(self, op, pointer, value, *rest)

    def init(self: Any, function: Callable, *rest: Any) -> None:
        made(self, function, *rest)

        def run(**arguments: Any) -> None:
            nonlocal looks
            number = builder.grid_idx[0]
            now = [(self.grid[0] - 1 - number if backwards else number, arguments), *put_off]
            put_off.clear()
            for number, given in now:
                builder.set_grid_idx(number, 0, 0)
                looks = 0
                try:
                    function(**given)
                except _Waits:
                    put_off.append((number, given))

        run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        run.__module__ = function.__module__
        self.fn = run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__init__", init)
        patch.setattr(interpreter.InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw)
        yield
        assert not put_off, "programs that wait for ever"


def programs_wait_for_those_that_shrink() -> None:
    """In whatever order they come. Three launches of the same flags, of other rows each."""
    w, flags = weights((30, 12), 70, 20, torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    x, weight = drawn(19, 70, seed=1).bfloat16(), drawn(42, 70, seed=2).bfloat16()
    slots = torch.tensor((1, 0, 3, 2, 2) * 3 + (0, 1, 2, 3), dtype=torch.int32)
    want = exact_linear(x, weight, None)
    triton_lora.add_lora(want, x, slots, *w)
    for backwards in (False, True):
        with in_order(backwards):
            for rows in (slice(0, 5), slice(5, 6), slice(0, 19)):
                around = Surroundings(lora=(slots[rows], *w, flags)).following
                assert torch.equal(exact_linear(x[rows], weight, None, None, *around), want[rows])


BUGS = {
    "another slot": ("== number + 1)", "== number)"),
    "no wait": ("while done < before:", "while done < 0:"),
    "flags that stay": ("        tl.store(flags, 0)\n", ""),
    "readers that stay": ("        tl.store(flags + 1, 0)\n", ""),
    "counted before all have ended": ("== readers - 1:", "== readers - 2:"),
    "another part's rank": ("slot[:, None] * PARTS + part[None, :], mask", "slot[:, None] * PARTS, mask"),
    "ranks of 16 alone": ("// (RANK // 16) % PARTS", "% PARTS"),
    "what lies behind the rank": ("inside = r + i < rank", "inside = r + i < rank + 8"),
}


def a_planted_bug_is_seen(name: str) -> None:
    old, new = BUGS[name]
    source = Path(triton_adapted.__file__).read_text()
    assert source.count(old) == 1
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path = Path(directory) / "planted.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("planted", path)
        assert spec is not None and spec.loader is not None  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for function in ("shrink", "expand", "note_expanded"):
            patch.setattr(triton_linear, function, getattr(module, function))
        with pytest.raises(AssertionError):
            programs_wait_for_those_that_shrink()


AROUND = {"gate": {"activation": "silu", "norm": True}, "residual": {"residual": True}}
INTERPRETED = {
    **{
        f"bits-{kind}-{parts}": functools.partial(has_the_bits_of_a_launch_of_its_own, kind, PARTS[parts])
        for kind, parts in itertools.product(KINDS, PARTS)
    },
    **{
        f"bits-{kind}-{around}": functools.partial(
            has_the_bits_of_a_launch_of_its_own, kind, PARTS["cut tiles"], AROUND[around]
        )
        for kind, around in itertools.product(KINDS, AROUND)
        if (kind, around) != ("exact", "gate")  # whose norm is an op of its own
    },
    "bits-exact-gate": functools.partial(
        has_the_bits_of_a_launch_of_its_own, "exact", PARTS["cut tiles"], {"activation": "silu"}
    ),
    "counters": parts_of_the_inputs_are_expanded_once,
    "waits": programs_wait_for_those_that_shrink,
    **{f"planted-{name}": functools.partial(a_planted_bug_is_seen, name) for name in BUGS},
}
ORDINARY = ["bits-int8-cut tiles", "planted-no wait"]
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # outputs, inputs, parts, what is around
    "qkv": (6144, 4096, 3, {"norm": True}),
    "gate_up": (28672, 4096, 2, {"norm": True, "activation": "silu"}),
    "down": (1024, 3072, 1, {"residual": True}),  # whose inputs have parts
}
CASES = [*itertools.product(((8, 0), (9, 0)), KINDS, SHAPES, (1, 32))]
SOME = {((9, 0), "int4-32", "down", 1)}


def launches(
    capability: tuple[int, int], kind: str, name: str, rows: int, slots: int = 8
) -> list[ahead_of_time.Launch]:
    outputs, inputs, parts, around = SHAPES[name]
    b, flags = empty(slots, outputs // 16, 64, 16), integers(2)
    lora = integers(rows), empty(slots, parts, 64, inputs), b, integers(slots, parts), floats(slots, parts)
    given = Surroundings(
        empty(inputs) if "norm" in around and kind != "exact" else None,
        EPS,
        around.get("activation", ""),
        empty(rows, outputs) if "residual" in around else None,
        lora=(*lora, integers(parts + 1), flags),
    )
    modules, x = (triton_linear, triton_quantized, triton_quantized_a8, triton_quantize_rows), empty(rows, inputs)
    with programmatic_launches(capability >= (9, 0)), ahead_of_time.recorded(capability, *modules) as recorded:
        if kind == "exact":
            count = num_counters(outputs, inputs)
            exact_linear(x, empty(outputs, inputs), None, integers(count) if count else None, *given.following)
            return recorded
        form = FORMS[kind.removesuffix("-a8")]
        weight = empty_quantized_gpu(form, outputs, inputs, torch.device("meta"))
        constants = form.element, form.group_size, outputs
        if kind.endswith("-a8"):
            triton_quantized_a8.quantized_linear_a8(x, *weight, None, None, False, *constants, *given)
        else:
            triton_quantized.quantized_linear(x, *weight, None, *constants, *given)
    return recorded


@pytest.mark.parametrize(
    ("capability", "kind", "name", "rows"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.battery) for case in CASES],
    ids=str,
)
def test_compiles_without_spills(capability: tuple[int, int], kind: str, name: str, rows: int) -> None:
    launch = launches(capability, kind, name, rows)[-1]
    binary, registers = ahead_of_time.without_spills(launch, capability)
    print(f"| {capability} {kind} {name} {rows} | {registers} | {binary.metadata.shared // 1024} KB |")
    assert binary.metadata.shared <= PROGRAM_MEMORY[capability]
    ptx = binary.asm["ptx"]
    stored, released = ptx.split("global.gpu.release.add")  # by those that shrink
    assert "bar.sync" in stored[stored.rindex("st.global") :], "all threads have stored"
    assert "global.gpu.acquire." in stored + released  # by those that wait


# ---- refused --------------------------------------------------------------------------------------------------------


def test_others_are_refused() -> None:
    w, flags, slots = weights((16,), 64, 16, torch.bfloat16), integers(2), torch.zeros(2, dtype=torch.int32)
    x, weight = torch.ones(40, 64).bfloat16(), torch.ones(16, 64).bfloat16()
    for rows, lora, message in (
        (40, (slots, *w, flags), "x must have at most 32 rows with adapters, got 40; see add_lora"),
        (2, (slots, *w, flags), r"flags must be a contiguous \[2\] of torch.int32 on cpu"),
        (2, (slots.long(), *w, flags), r"slots must be a contiguous \[2\] of torch.int32"),
        (2, (slots, *w._replace(a=w.a[0]), flags), r"a must be \[S, P, R, 64\]"),
        (2, (slots, *w._replace(b=w.b[:, :0]), flags), "b must be of 16 outputs"),
    ):
        with pytest.raises(ValueError, match=f"exact_linear: {message}"):
            exact_linear(x[:rows], weight, None, None, *Surroundings(lora=lora).following)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """The bits of launches of its own, also where a step is replayed."""
    w = weights((4096, 1024, 1024), 4096, 64, torch.bfloat16, slots=8)
    on_gpu = type(w)(*(tensor.cuda() for tensor in w))
    x, weight = torch.randn(32, 4096).bfloat16().cuda(), torch.randn(6144, 4096).bfloat16().cuda()
    slots, flags = (torch.arange(32, dtype=torch.int32) % 9).cuda(), torch.zeros(2, dtype=torch.int32).cuda()
    want = exact_linear(x, weight, None)
    triton_lora.add_lora(want, x, slots, *on_gpu)
    around = Surroundings(lora=(slots, *on_gpu, flags)).following
    for programmatic in (False, True):
        with programmatic_launches(programmatic):
            assert torch.equal(exact_linear(x, weight, None, None, *around), want)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [exact_linear(x, weight, None, None, *around) for _ in range(3)]
        for _ in range(100):
            graph.replay()
        assert all(torch.equal(got, want) for got in results)
        assert not flags.any()
