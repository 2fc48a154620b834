"""A native program does what its calls do one by one, with every kind of argument, and keeps nothing."""

import gc
import re
import subprocess
import weakref
from pathlib import Path

import pytest
import torch

from compiled_llm import ops
from compiled_llm.ops import native, native_program
from compiled_llm.ops.native_program import DTYPES, EMPTY, MOST_ARGUMENTS, VIEW, Program, Run, Step, prepare
from compiled_llm.ops.torch_private import kernel_address

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


def test_all_kinds_of_arguments() -> None:
    """A view of a size that is known at the call, an op of two results with an optional tensor, text, numbers."""
    x, weight = torch.randn(3, 8), torch.rand(8)
    logits = torch.randn(3, 6)
    steps = (
        Step(VIEW, (("Tensor", 0), ("size", 0), ("int", 4), ("int", 8), ("int", 1), ("size", 1)), (4,), ()),
        Step("rms_norm", (("Tensor", 4), ("Tensor", 1), ("float", 1e-6)), (5,), (1,)),
        Step(
            "route",
            (
                *(("Tensor", 2), ("Optional[Tensor]", -1), ("int", 2), ("str", "softmax"), ("float", 1.5)),
                *(("int", 1), ("int", 1)),
            ),
            (6, 7),
            (),
        ),
        Step("add_rms_norm", (("Tensor", 5), ("Tensor", 4), ("Tensor", 3), ("float", 1e-6)), (8, 9), (8,)),
    )
    run = prepare(Program(10, 4, 0, (9, 6, 7), steps))
    assert run is not None
    half = torch.rand(4)
    for rows, offset in ((3, 4), (2, 0)):
        outputs = run([], [x, weight[:4].contiguous(), logits, half], [rows, offset])
        part = x[:rows, offset : offset + 4]
        normed = ops.rms_norm(part, weight[:4].contiguous(), 1e-6)
        expected = (
            ops.add_rms_norm(normed, part, half, 1e-6)[1],
            *torch.ops.compiled_llm.route(logits, None, 2, "softmax", 1.5, 1, 1),
        )
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))


def test_what_an_op_refuses_is_its_own_error() -> None:
    run = prepare(
        Program(3, 2, 1, (2,), (Step("rms_norm", (("Tensor", 0), ("Tensor", 1), ("float", 1e-6)), (2,), ()),))
    )
    assert run is not None
    with pytest.raises(ValueError, match="weight must be"):
        run([torch.randn(2, 8)], [torch.rand(4)], [])
    with pytest.raises(ValueError, match="the program takes 2 tensors, got 1"):
        run([torch.randn(2, 8)], [], [])


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an input after the call, nor the program after its function."""
    library, deleted = native_program._library(), list[int]()
    monkeypatch.setattr(library, "delete_program", deleted.append)
    run = prepare(
        Program(3, 2, 1, (2,), (Step("rms_norm", (("Tensor", 0), ("Tensor", 1), ("float", 1e-6)), (2,), ()),))
    )
    assert run is not None
    x, weight = torch.randn(2, 8), torch.rand(8)
    output = run([x], [weight], [])[0]
    ends = [weakref.ref(tensor) for tensor in (x, weight, output)]
    del x, weight, output
    gc.collect()
    assert [end() for end in ends] == [None] * 3
    made = run._made
    del run
    assert deleted == [made]


@pytest.mark.parametrize("name", DTYPES)
def test_an_empty_tensor_has_the_dtype_sizes_and_strides_that_it_was_asked_for(name: str) -> None:
    """In a bound run contiguous ones are made of what earlier calls left, and others never are."""
    number = ("int", DTYPES.index(name))
    steps = (
        Step(EMPTY, (number, ("size", 0), ("int", 4), ("int", 4), ("int", 1)), (1,), ()),
        Step(EMPTY, (number, ("size", 0), ("int", 4), ("int", 1), ("size", 0)), (2,), ()),
        Step(EMPTY, (number,), (3,), (3,)),
    )
    run = prepare(Program(4, 1, 1, (1, 2), steps))
    assert run is not None
    bound, x = run.bound(), torch.zeros(1)
    for rows in (3, 5, 3, 20_000):
        for outputs in (bound([x], [], [rows]), run([x], [], [rows])):
            assert [tensor.dtype for tensor in outputs] == [getattr(torch, name)] * 2
            assert [tensor.shape for tensor in outputs] == [(rows, 4)] * 2
            assert [tensor.stride() for tensor in outputs] == [(4, 1), (1, rows)]
            for tensor in outputs:
                tensor.view(torch.uint8 if tensor.is_contiguous() else tensor.dtype).fill_(1)


@pytest.mark.parametrize("columns", [8, 1])
def test_memory_of_other_strides_is_not_given_again(columns: int) -> None:
    """Though torch says of one column with any strides that it is contiguous."""
    number, sizes = ("int", DTYPES.index("float32")), (("int", 3), ("int", columns))
    steps = (
        Step(EMPTY, (number, *sizes, ("int", 1), ("int", 3)), (1,), (1,)),
        Step(EMPTY, (number, *sizes, ("int", columns), ("int", 1)), (2,), ()),
    )
    run = prepare(Program(3, 1, 1, (2,), steps))
    assert run is not None
    bound, x = run.bound(), torch.zeros(1)
    for _ in range(100):
        (output,) = bound([x], [], [])
        assert output.stride() == (columns, 1)
        del output


@pytest.mark.parametrize("count", [3, 7, MOST_ARGUMENTS])
def test_a_kernel_takes_memory_and_sizes_in_any_order(count: int, tmp_path: Path) -> None:
    """Arguments past the sixth are on the stack."""
    numbers = ", ".join(f"int64_t n{place}" for place in range(count - 2))
    total = " + ".join(f"{place + 1} * n{place}" for place in range(count - 2))
    source = f"""#include <cstdint>
extern "C" void kernel(const float* x, {numbers}, float* out) {{ *out = *x + {total}; }}"""
    (tmp_path / "kernel.cpp").write_text(source)
    compiler = native.compiler()
    assert compiler is not None
    built = tmp_path / "kernel.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, tmp_path / "kernel.cpp"], check=True)
    sizes = [("size", 0), *(("int", place) for place in range(1, count - 2))]
    float32 = DTYPES.index("float32")
    steps = (
        Step(EMPTY, (("int", float32), ("int", 1), ("int", 1)), (1,), ()),
        Step("piece_0.kernel", (("Tensor", 0), *sizes, ("Tensor", 1)), (), (0,)),
    )
    run = prepare(Program(2, 1, 1, (1,), steps), {"piece_0.kernel": kernel_address(built)})
    assert run is not None
    rest = sum((place + 1) * place for place in range(1, count - 2))
    for size in (5, -2):
        assert run([torch.tensor([0.5])], [], [size])[0].tolist() == [0.5 + size + rest]


def normed_twice() -> Run:
    """Of x, both sums and norms, one of them by way of a view; the weight is the argument."""
    steps = (
        Step("rms_norm", (("Tensor", 1), ("Tensor", 0), ("float", 1e-6)), (2,), ()),
        Step("add_rms_norm", (("Tensor", 2), ("Tensor", 1), ("Tensor", 0), ("float", 1e-6)), (3, 4), (2,)),
        Step(VIEW, (("Tensor", 4), *(("int", value) for value in (1, 8, 8, 1, 0))), (5,), (4,)),
        Step("rms_norm", (("Tensor", 3), ("Tensor", 0), ("float", 1e-6)), (6,), (3,)),
        Step("rms_norm", (("Tensor", 5), ("Tensor", 0), ("float", 1e-6)), (7,), (0, 1, 5)),
    )
    run = prepare(Program(8, 2, 1, (6, 7), steps))
    assert run is not None
    return run


def test_a_bound_run_does_the_same_with_what_its_argument_holds_by_then() -> None:
    """Each call has other inputs, also of other sizes. Results stay, though memory of earlier steps is used again."""
    run, weight = normed_twice(), torch.rand(8)
    bound, kept = run.bound(), []
    for rows in (3, 3, 1, 3, 1):
        x = torch.randn(rows, 8)
        outputs = bound([weight], [x], [])
        kept.append((outputs, [each.clone() for each in outputs]))
        assert all(torch.equal(one, other) for one, other in zip(outputs, run([weight], [x], []), strict=True))
        weight += 1
    assert all(torch.equal(one, other) for made in kept for one, other in zip(*made, strict=True))
    assert bound.held == [weight]


def test_all_inputs_may_be_arguments() -> None:
    steps = (Step("rms_norm", (("Tensor", 1), ("Tensor", 0), ("float", 1e-6)), (2,), (0, 1)),)
    run = prepare(Program(3, 2, 2, (2,), steps))
    assert run is not None
    bound, weight, x = run.bound(), torch.rand(8), torch.randn(3, 8)
    for _ in range(3):
        assert torch.equal(bound([weight, x], [], [])[0], ops.rms_norm(x, weight, 1e-6))
        x += 1


def test_an_argument_of_other_memory_is_refused() -> None:
    bound, weight, x = normed_twice().bound(), torch.rand(8), torch.randn(3, 8)
    expected = bound([weight], [x], [])
    before, weight.data = weight.data, torch.rand(8)
    for _ in range(2):
        with pytest.raises(ValueError, match="argument 0 has other memory than when it was bound"):
            bound([weight], [x], [])
    weight.data = before
    assert all(torch.equal(one, other) for one, other in zip(bound([weight], [x], []), expected, strict=True))


def test_a_bound_run_keeps_its_arguments_and_frees_them() -> None:
    bound, weight, x = normed_twice().bound(), torch.rand(8), torch.randn(3, 8)
    with pytest.raises(ValueError, match="weight must be"):
        bound([torch.rand(4)], [x], [])
    bound([weight], [x], [])
    ends = [weakref.ref(tensor) for tensor in (weight, x)]
    del weight, x
    gc.collect()
    assert [end() is None for end in ends] == [False, True]
    del bound
    gc.collect()
    assert ends[0]() is None


WORDS = {"Optional[Tensor]": "OptionalTensor", "int": "int64_t", "float": "double", "str": "std::string"}
ENTRIES = [
    (path, *entry)
    for path in sorted(Path(ops.__file__).parent.rglob("*_cpu.cpp"))
    for entry in re.findall(r'\{"(\w+)", Boxed<(\w+)>::call', path.read_text())
]


@pytest.mark.parametrize(("path", "op", "function"), ENTRIES, ids=[op for _, op, _ in ENTRIES])
def test_a_function_takes_what_the_schema_says(path: Path, op: str, function: str) -> None:
    """A program hands on addresses: of a ``bool`` that is read as an ``int64_t``, seven bytes would be others'."""
    found = rf"^(?:inline )?[\w:<>, ]+ {function}\(([^)]*)\) \{{"
    sources = path, *path.parent.parent.rglob("*_cpu.h")  # which has ops of other folders
    taken = next(each for source in sources for each in re.findall(found, source.read_text(), re.MULTILINE))
    parameters = taken.replace("std::optional<Tensor>", "OptionalTensor").replace("const ", "").split(",")
    words = [parameter.split()[0].rstrip("&") for parameter in parameters]
    asked = [str(each.type) for each in getattr(torch.ops.compiled_llm, op).default._schema.arguments]
    assert words == [WORDS.get(each, each) for each in asked]
