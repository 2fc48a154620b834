"""``own_settings``: nested, in several threads, with errors, in a fork; and what the program changes meanwhile."""

import threading

import pytest
import torch

from compiled_llm.ops.torch_settings import own_settings
from tests.forked import in_fork


@pytest.fixture(autouse=True)
def _of_the_program() -> object:
    """A default dtype, which belongs to the process, and no gradients, which belong to this thread."""
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        yield
    torch.set_default_dtype(torch.float32)


def test_the_program_has_its_own_again_after_the_last_of_nested_ones() -> None:
    with own_settings():
        assert torch.ones(1).dtype == torch.float32
        with own_settings():
            assert torch.ones(1).dtype == torch.float32
        assert torch.ones(1).dtype == torch.float32
        assert not torch.is_grad_enabled()
    assert torch.ones(1).dtype == torch.float64
    assert not torch.is_grad_enabled()


def test_after_an_error() -> None:
    def work() -> None:
        with torch.device("meta"), torch.enable_grad(), own_settings(1):
            assert torch.ones(1).device.type == "cpu"
            raise KeyError

    threads = torch.get_num_threads()
    with pytest.raises(KeyError):
        work()
    assert torch.get_num_threads() == threads
    assert torch.ones(1).dtype == torch.float64
    with torch.device("meta"):
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"


def test_the_last_of_several_threads_puts_back_what_belongs_to_the_process() -> None:
    inside, may_end = threading.Event(), threading.Event()
    found = []

    def other() -> None:
        with own_settings():
            inside.set()
            may_end.wait()
            found.append(torch.get_default_dtype())

    thread = threading.Thread(target=other)
    with own_settings():
        thread.start()
        inside.wait()
    assert torch.get_default_dtype() == torch.float32, "the other thread computes"
    may_end.set()
    thread.join()
    assert found == [torch.float32]
    assert torch.get_default_dtype() == torch.float64


def test_what_the_program_sets_meanwhile_stays() -> None:
    with own_settings():
        torch.set_default_dtype(torch.bfloat16)
        with own_settings():
            assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_dtype() == torch.bfloat16


def test_a_fork_has_those_of_the_program() -> None:
    def work() -> None:
        assert torch.get_default_dtype() == torch.float64
        with own_settings():
            assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == torch.float64

    with own_settings():
        assert in_fork(work) == 0
        assert torch.get_default_dtype() == torch.float32
