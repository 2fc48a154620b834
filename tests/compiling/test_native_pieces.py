"""Which of Inductor's programs are calls that a native program can make, and what takes their place."""

import ast

import pytest

from compiled_llm.compiling.native_pieces import NativePiece, inlined, native_piece
from compiled_llm.compiling.native_runs import native_runs, packed, unpacked
from compiled_llm.ops.native_program import DTYPES, EMPTY, VIEW, Step

SOURCE = """
import torch
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], r''' C++ ''')
class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        s7 = arg0_1
        s8 = s7
        buf0 = empty_strided_cpu((s8, 4), (4, 1), torch.bfloat16)
        cpp_fused_add_0(arg1_1, buf0, 2*s7)
        del arg1_1
        buf1 = reinterpret_tensor(buf0, (s7, 2), (4, 1), 2); del buf0  # reuse
        buf2 = buf1; del buf1  # reuse
        cpp_fused_add_0(arg2_1, buf2, s8)
        return (buf2, )
runner = Runner(partitions=[])
call = runner.call
"""
CALL = "b5, = piece_1([s0, a1, b3])"


def piece_of(source: str) -> NativePiece:
    found = native_piece(source)
    assert found is not None
    return found


def test_it_is_made_of_empty_tensors_views_and_kernels() -> None:
    piece = piece_of(SOURCE)
    assert piece.parameters == ("arg0_1", "arg1_1", "arg2_1")
    assert piece.results == ("buf1",)
    assert piece.kernels == {"cpp_fused_add_0": (True, True, False)}
    assert [ast.unparse(statement) for statement in piece.statements] == [
        "buf0 = empty_strided_cpu((arg0_1, 4), (4, 1), torch.bfloat16)",
        "cpp_fused_add_0(arg1_1, buf0, 2 * arg0_1)",
        "buf1 = reinterpret_tensor(buf0, (arg0_1, 2), (4, 1), 2)",
        "cpp_fused_add_0(arg2_1, buf1, arg0_1)",
    ]


def test_it_takes_the_place_of_a_call() -> None:
    (call,) = ast.parse(CALL.replace("s0", "3*s0")).body
    assert isinstance(call, ast.Assign)
    found = inlined("piece_1", piece_of(SOURCE), call, 7)
    assert [ast.unparse(statement) for statement in found] == [
        "p7_buf0 = empty_strided_cpu((3 * s0, 4), (4, 1), torch.bfloat16)",
        "piece_1.cpp_fused_add_0(a1, p7_buf0, 2 * (3 * s0))",
        "b5 = reinterpret_tensor(p7_buf0, (3 * s0, 2), (4, 1), 2)",
        "piece_1.cpp_fused_add_0(b3, b5, 3 * s0)",
    ]


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("        del arg1_1\n", "        buf9 = torch.ops.aten.topk.default(arg1_1, 2)\n"),
        ("        del arg1_1\n", "        extern_kernels.mm(arg1_1, arg2_1, out=buf0)\n"),
        ("        del arg1_1\n", "        buf9 = arg1_1[0]\n"),
        ("        del arg1_1\n", "        for each in args: pass\n"),
        ("torch.bfloat16", "torch.complex64"),
        ("2*s7", "math.ceil(s7)"),
        ("2*s7", "0.5*s7"),
        ("'const int64_t'", "'const double'"),
        ("'const int64_t'", ", ".join(["'const int64_t'"] * 31)),
        ("(arg1_1, buf0, 2*s7)", "(arg1_1, 0, 2*s7)"),
        ("(arg1_1, buf0, 2*s7)", "(arg1_1, buf0, s7, s7)"),
        ("return (buf2, )", "return (arg1_1, )"),
        ("(s8, 4), (4, 1)", f"({', '.join(['s8'] * 9)}), ({', '.join(['1'] * 9)})"),
        ("return (buf2, )", "return (buf2, buf1, )"),
        ("return (buf2, )", "return (reinterpret_tensor(buf2, (1, ), (1, ), 0), )"),
        ("def call", "def run"),
    ],
)
def test_what_a_program_cannot_do_stays(line: str, other: str) -> None:
    assert SOURCE.count(line) == 1
    assert native_piece(SOURCE.replace(line, other)) is None


def test_a_piece_of_sizes_alone_stays() -> None:
    """torch finds a native program by a tensor that it takes."""
    source = SOURCE.replace("arg1_1, buf0", "buf0, buf0").replace("arg2_1, buf2", "buf2, buf2")
    assert native_piece(source) is None


def test_pieces_and_ops_are_one_run() -> None:
    """A piece that writes an argument, and gives nothing, too; what lies between them stays out."""
    writes = SOURCE.replace("        buf0 = empty_strided_cpu((s8, 4), (4, 1), torch.bfloat16)\n", "")
    writes = "\n".join(line for line in writes.replace("buf0, 2*s7", "arg2_1, 2*s7").split("\n") if "buf" not in line)
    writes = writes.replace("del arg1_1", "return ()")
    source = f"""
def call(s0, a1, a2):
    b3 = torch.ops.compiled_llm.rms_norm.default(a1, a2, 1e-06)
    {CALL}
    del b3
    piece_2([s0, a1, b5])
    b6, = piece_3([b5])
    piece_2([4, a2, b6])
    return (b6, )
"""
    found = native_runs(source, {"piece_1": piece_of(SOURCE), "piece_2": piece_of(writes)})
    assert found is not None
    assert found.source.split("\n")[1:-1] == [
        "    b5, = run_1([a1, a2], [], (s0, 2 * s0))",
        "    b6, = piece_3([b5])",
        "    run_0([a2], [b6], (2 * 4,))",
    ]
    steps = found.runs["run_1"].steps
    names = ["rms_norm", EMPTY, "piece_1.cpp_fused_add_0", VIEW, "piece_1.cpp_fused_add_0", "piece_2.cpp_fused_add_0"]
    assert [step.op for step in steps] == names
    number = DTYPES.index("bfloat16")
    made = Step(EMPTY, (("int", number), ("size", 0), ("int", 4), ("int", 4), ("int", 1)), (3,), ())
    assert steps[1]._replace(results=(3,)) == made
    assert steps[2].arguments[2] == ("size", 1)
    assert steps[-1].results == ()
    assert found.runs["run_0"].steps[0].arguments[2] == ("size", 0)
    assert unpacked(packed(found.runs)) == found.runs
