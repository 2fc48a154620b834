"""Machine code is read from the disassembler's text, and its parts from its jumps and line numbers."""

from pathlib import Path

import pytest

from compiled_llm.gpu_step.amounts import Share, Work
from compiled_llm.gpu_step.estimate import check_loops, estimate, instructions
from compiled_llm.gpu_step.flow import read_flow
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.gpu_step.kernels import Compiled
from compiled_llm.gpu_step.launches import Launch, TritonKernel
from compiled_llm.gpu_step.sass import CLASSES, class_of, code_of, read_sass

TEXT = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   IMAD.WIDE R2, R3, 0x2, R2 ;
.L_x_0:
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR4][R2.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0050*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0060*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0070*/                   F2FP.BF16.F32.PACK_AB R4, R5, R4 ;
        /*0080*/                   FADD R4, R4, R5 ;
        /*0090*/              @P1  BRA `(.L_x_2) ;
        /*00a0*/                   IADD3 R4, R4, 0x1, RZ ;
.L_x_2:
        /*00b0*/                   ISETP.NE.AND P1, PT, R4, R5, PT ;
        /*00c0*/                   SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;
        /*00d0*/              @P1  BRA `(.L_x_1) ;
        /*00e0*/                   EXIT ;
.L_x_3:
        /*00f0*/                   BRA `(.L_x_3);
"""


def test_all_instructions_are_counted_by_class() -> None:
    code = code_of(read_sass(TEXT))
    expected = {"memory": 3, "integer": 4, "float": 1, "tensor": 1, "conversion": 1, "exchange": 1, "control": 5}
    assert code.counts == expected
    assert code.size == 16
    assert set(CLASSES) == expected.keys()


def test_the_main_loop_is_the_innermost_one_with_products() -> None:
    loop = read_flow(read_sass(TEXT)).loop
    assert loop is not None
    assert loop.counts["tensor"] == 1
    assert loop.size == 4
    assert loop.loads == {16: 1, 2: 1}
    assert loop.asynchronous
    assert loop.load_bytes == 16
    assert loop.bytes_loaded == 18


def test_without_products_the_longest_loop_is_the_main_one() -> None:
    loop = read_flow(read_sass(TEXT.replace("HMMA.16816.F32.BF16", "FFMA"))).loop
    assert loop is not None
    assert loop.size == 7
    assert loop.load_bytes == 0


def test_a_jump_to_itself_is_no_loop() -> None:
    flow = read_flow(read_sass(".L_x_3:\n        /*00f0*/                   BRA `(.L_x_3);\n"))
    assert flow.loop is None
    assert flow.code.size == 1


def test_conversions_to_two_halves_are_conversions() -> None:
    assert class_of("F2FP.BF16.F32.PACK_AB R4, R5, R4") == "conversion"
    assert class_of("FFMA R4, R5, R4, R3") == "float"
    assert class_of("LDGDEPBAR ") == "control"
    assert class_of("LDG.E.128 R4, R5") == "memory"
    assert class_of("LEA R4, R5, R6") == "integer"


# ---- parts ----------------------------------------------------------------------------------------------------------

KERNELS = "/another/copy/compiled_llm/ops/attention/triton_kernels.py"
DECODE = "/another/copy/compiled_llm/ops/attention/triton_decode.py"


def line_of(path: str, text: str) -> int:
    file = Path(__file__).parents[2] / path.rpartition("/compiled_llm/")[2]
    return next(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def tasks(joining: str = "merge") -> str:
    """A loop over tasks: some make a key, all have the main loop, and some join in a loop of its own."""
    own = line_of(DECODE, "    num_tasks = tl.load(tasks)")
    new, joined = (line_of(path, f"def {name}(") for path, name in ((DECODE, "_write_new"), (KERNELS, joining)))
    return f"""
	//## File "{DECODE}", line {own}
        /*0000*/                   MOV R1, R2 ;
        /*0010*/               @P0 EXIT ;
.L_x_0:
        /*0020*/                   IADD3 R4, R4, 0x1, RZ ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
	//## File "{DECODE}", line {new} inlined at "{DECODE}", line {own}
	//## File "{DECODE}", line {own}
        /*0040*/                   STG.E [R2], R4 ;
        /*0050*/                   STG.E [R2], R4 ;
        /*0060*/                   CALL.REL.NOINC `($division) ;
.L_x_1:
	//## File "{DECODE}", line {own}
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/               @P2 BRA `(.L_x_3) ;
	//## File "{KERNELS}", line {joined} inlined at "{DECODE}", line {own}
	//## File "{DECODE}", line {own}
        /*00a0*/                   MOV R1, R2 ;
.L_x_2:
        /*00b0*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*00c0*/                   FADD R4, R4, R5 ;
        /*00d0*/               @P3 BRA `(.L_x_2) ;
.L_x_3:
	//## File "{DECODE}", line {own}
        /*00e0*/               @P4 BRA P5, `(.L_x_0) ;
        /*00f0*/                   EXIT ;
$division:
        /*0100*/                   FADD R4, R4, R5 ;
        /*0110*/                   RET.REL.NODEC R44 `(decode_kernel) ;
"""


def test_parts_follow_from_jumps_and_lines() -> None:
    parts = read_flow(read_sass(tasks())).parts
    found = {(part.place, part.looped, *sorted(part.functions - {"decode_kernel"})): part.code.size for part in parts}
    assert found == {
        ("once", False): 3,
        ("task", False): 4,
        ("task", False, "_write_new"): 3,
        ("main", False): 2,
        ("task", False, "merge"): 1,
        ("task", True, "merge"): 3,
        ("called", False): 2,
    }


def test_each_part_counts_as_often_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = read_flow(read_sass(tasks()))
    monkeypatch.setattr(Compiled, "flow", property(lambda self: flow))
    compiled = Compiled(32, 0, 0, 2, 3, 1, b"")
    shares = {"_write_new": Share(5), "merge": Share(4, turns=6, is_last=True)}
    counted = instructions(Work(0, 0, entries=20, trips=100, shares=shares), compiled, programs=10)
    assert counted.all == 10 * 3 + 20 * 4 + 5 * 3 + 100 * 2 + 4 * (1 + 6 * 3)
    assert counted.longest == 3 + 2 * 4 + 3 + 10 * 2
    assert counted.last == 1 + 6 * 3
    # Programs without a task leave at once; nobody joins or makes a key.
    none = {"_write_new": Share(0), "merge": Share(0, is_last=True)}
    counted = instructions(Work(0, 0, entries=4, trips=4, shares=none), compiled, programs=10)
    assert (counted.all, counted.longest, counted.last) == (10 * 3 + 4 * 4 + 4 * 2, 3 + 4 + 2, 0)


def compiled_tasks(monkeypatch: pytest.MonkeyPatch, joining: str = "merge") -> Compiled:
    flow = read_flow(read_sass(tasks(joining)))
    monkeypatch.setattr(Compiled, "flow", property(lambda self: flow))
    return Compiled(32, 0, 0, 2, 3, 1, b"")


def test_a_loop_of_which_nobody_says_how_often_it_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, share = compiled_tasks(monkeypatch), Share(4, turns=6, is_last=True)
    check_loops("decode_kernel", Work(0, 0, shares={"merge": share}), compiled)
    check_loops("decode_kernel", Work(0, 0, single=frozenset({"merge"})), compiled)
    with pytest.raises(ValueError, match=r"decode_kernel: .*\(merge\)"):
        check_loops("decode_kernel", Work(0, 0), compiled)


def test_a_loop_that_could_be_taken_for_the_main_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``attend`` is not among the functions whose loops are beside the main one, whatever is said of it."""
    compiled = compiled_tasks(monkeypatch, "attend")
    with pytest.raises(ValueError, match="BESIDES"):
        check_loops("decode_kernel", Work(0, 0, shares={"attend": Share(4, turns=6)}), compiled)


def test_programs_without_a_task_look_for_one_on_all_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, gpu = compiled_tasks(monkeypatch), GPUS["h100"]
    launch = Launch("split_kernel", "op", "", (), (), TritonKernel(None, {}, {}, (264,)))
    work = Work(0, 0, entries=0, trips=0, shares={"merge": Share(0, is_last=True), "_write_new": Share(0)})
    assert estimate(launch, work, compiled, gpu).issue == pytest.approx(264 * 3 * 2 / (132 * 4 * gpu.clock))
