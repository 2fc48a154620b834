"""Machine code is read from the disassembler's text."""

from compiled_llm.report.gpu_step.sass import CLASSES, class_of, read_sass

TEXT = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
                                                             /* 0x00000a00ff017b82 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   IMAD.WIDE R2, R3, 0x2, R2 ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR4][R2.64] ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0050*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0060*/              @!P0 BRA 0x30 ;
        /*0070*/                   F2FP.BF16.F32.PACK_AB R4, R5, R4 ;
        /*0080*/                   FADD R4, R4, R5 ;
        /*0090*/              @P1  BRA `(.L_x_3) ;
        /*00a0*/                   IADD3 R4, R4, 0x1, RZ ;
        /*00b0*/                   ISETP.NE.AND P1, PT, R4, R5, PT ;
        /*00c0*/                   SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;
        /*00d0*/              @P1  BRA 0x70 ;
        /*00e0*/                   EXIT ;
        /*00f0*/                   BRA 0xf0;
"""


def test_all_instructions_are_counted_by_class() -> None:
    code, _ = read_sass(TEXT)
    expected = {"memory": 3, "integer": 4, "float": 1, "tensor": 1, "conversion": 1, "exchange": 1, "control": 5}
    assert code.counts == expected
    assert code.size == 16
    assert set(CLASSES) == expected.keys()


def test_the_main_loop_is_the_innermost_one_with_products() -> None:
    _, loop = read_sass(TEXT)
    assert loop is not None
    assert loop.counts["tensor"] == 1
    assert loop.size == 4
    assert loop.loads == {16: 1, 2: 1}
    assert loop.asynchronous
    assert loop.load_bytes == 16
    assert loop.bytes_loaded == 18


def test_without_products_the_longest_loop_is_the_main_one() -> None:
    _, loop = read_sass(TEXT.replace("HMMA.16816.F32.BF16", "FFMA"))
    assert loop is not None
    assert loop.size == 7
    assert loop.load_bytes == 0


def test_a_jump_to_itself_is_no_loop() -> None:
    code, loop = read_sass("        /*00f0*/                   BRA 0xf0;\n")
    assert loop is None
    assert code.size == 1


def test_conversions_to_two_halves_are_conversions() -> None:
    assert class_of("F2FP.BF16.F32.PACK_AB R4, R5, R4") == "conversion"
    assert class_of("FFMA R4, R5, R4, R3") == "float"
    assert class_of("LDGDEPBAR ") == "control"
    assert class_of("LDG.E.128 R4, R5") == "memory"
    assert class_of("LEA R4, R5, R6") == "integer"
