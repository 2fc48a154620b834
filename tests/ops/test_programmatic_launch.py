"""Who asks for programmatic launches. What kernels do then: ``tests/report/gpu_step``, in their machine code."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from compiled_llm.ops.programmatic_launch import launch_options, programmatic_launches

ORDINARY = {"PROGRAMMATIC": False}
ALLOWED = {"PROGRAMMATIC": True, "launch_pdl": True}


def test_they_are_allowed_within_the_block_alone() -> None:
    assert launch_options() == ORDINARY
    with programmatic_launches():
        assert launch_options() == ALLOWED
        with programmatic_launches(False):
            assert launch_options() == ORDINARY
        assert launch_options() == ALLOWED
    assert launch_options() == ORDINARY


def test_after_an_error_they_are_not_allowed() -> None:
    with pytest.raises(RuntimeError, match="capture"), programmatic_launches():
        raise RuntimeError("capture")
    assert launch_options() == ORDINARY


def test_another_thread_does_not_have_them() -> None:
    with programmatic_launches(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch_options).result() == ORDINARY
