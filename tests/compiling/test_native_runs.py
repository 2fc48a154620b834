"""Which statements of a program become native runs, and what these take and give."""

from compiled_llm.compiling.native_runs import native_runs, packed, unpacked
from compiled_llm.ops.native_program import VIEW, Program, Step

SOURCE = """
def call(s0, a1, a2, a3):
    b0, = piece_0([a1])
    del a1
    b1 = torch.ops.compiled_llm.rms_norm.default(b0, a2, 1e-06)
    del b0
    b2 = reinterpret_tensor(b1, (s0, 2, 4, ), (8, 4, 1, ), 4*s0)
    b3 = torch.ops.compiled_llm.add_rms_norm.default(b2, b2, a3, float('inf'))
    b4 = b3[1]
    del b2, b3, a3
    b5, = piece_1([b4, b1])
    b6 = b5[(slice(1, None, None))]
    return (b6, b1, )
"""
NATIVE = """def call(s0, a1, a2, a3):
    b0, = piece_0([a1])
    del a1
    b1, b4 = run_0([a2, a3], [b0], (s0, 4 * s0))
    del b0, a3
    b5, = piece_1([b4, b1])
    b6 = b5[slice(1, None, None)]
    return (b6, b1)"""
SHAPE = (("size", 0), ("int", 2), ("int", 4), ("int", 8), ("int", 4), ("int", 1), ("size", 1))
STEPS = (
    Step("rms_norm", (("Tensor", 2), ("Tensor", 0), ("float", 1e-6)), (3,), (0, 2)),
    Step(VIEW, (("Tensor", 3), *SHAPE), (4,), ()),
    Step("add_rms_norm", (("Tensor", 4), ("Tensor", 4), ("Tensor", 1), ("float", float("inf"))), (5, 6), (1, 4, 5)),
)


def test_a_run_takes_the_place_of_its_statements() -> None:
    found = native_runs(SOURCE)
    assert found is not None
    assert found.source == NATIVE
    assert found.runs == {"run_0": Program(7, 3, 2, (3, 6), STEPS)}
    assert unpacked(packed(found.runs)) == found.runs


def test_an_op_without_results_is_part_of_a_run() -> None:
    source = """
def call(a0, a1, a2, a3):
    b0 = torch.ops.compiled_llm.rms_norm.default(a0, a1, 1e-06)
    b1 = torch.ops.compiled_llm.write_slots.default(a2, a3, b0, 8)
    del b1, a2, a3
    b2 = torch.ops.compiled_llm.rms_norm.default(b0, a1, 1e-06)
    return (b2, )
"""
    found = native_runs(source)
    assert found is not None
    assert "run_0([a0, a1, a2, a3], [], ())" in found.source
    steps = found.runs["run_0"].steps
    written = Step("write_slots", (("Tensor", 2), ("Tensor", 3), ("Tensor", 4), ("int", 8)), (), (2, 3))
    assert steps[1] == written
    assert [step.op for step in steps] == ["rms_norm", "write_slots", "rms_norm"]


def test_one_call_alone_and_ops_without_kernels_stay() -> None:
    """As ops of a kind that a program cannot call do, and results that they have."""
    one = "def call(a0, a1):\n    b0 = torch.ops.compiled_llm.rms_norm.default(a0, a1, 1e-06)\n    return (b0, )\n"
    assert native_runs(one) is None
    other = one.replace("rms_norm.default(a0, a1, 1e-06)", "store_state.default(a0, a1)\n    b1 = b0[0]\n    del b1")
    assert native_runs(other) is None
