"""ArgumentCheck: what later arguments may differ in, and what not."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.compiling import argument_specs
from compiled_llm.compiling.argument_specs import ArgumentCheck, examples_of, spec_of, specs_of
from compiled_llm.ops.torch_private import DynamicSize, mark_dynamic_size


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


def dynamic(size: int) -> Tensor:
    tensor = torch.zeros(size, 4)
    mark_dynamic_size(tensor, 0, DynamicSize("blocks", 3))
    return tensor


def arguments(**changed) -> tuple:
    parts = {"a": torch.zeros(2, 3), "caches": (dynamic(3), dynamic(3)), "number": 7} | changed
    return Pair(parts["a"], None), parts["caches"], parts["number"]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"a": torch.ones(2, 3)},
        {"caches": (torch.zeros(9, 4), torch.zeros(9, 4))},
        {"caches": (torch.zeros(1, 4), torch.zeros(1, 4))},
    ],
)
def test_other_contents_and_another_dynamic_size_are_no_difference(changed: dict) -> None:
    check = ArgumentCheck(arguments())
    assert check.difference(arguments(**changed)) is None
    assert check.difference(arguments()) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a": torch.zeros(2, 4)}, r"argument\[0\]\[0\] was of shape \(2, 3\) and is \(2, 4\)"),
        ({"a": torch.zeros(3, 2).T}, "was of strides"),
        ({"a": torch.zeros(2, 3, dtype=torch.float64)}, "was torch.float32 on cpu and is torch.float64"),
        ({"a": torch.zeros(2, 3, requires_grad=True)}, "requires gradients"),
        ({"a": None}, "was a tensor and is None"),
        (
            {"caches": (torch.zeros(9, 4), torch.zeros(8, 4))},
            r"argument\[1\]\[1\] was of shape \(9, 4\) and is \(8, 4\)",
        ),
        ({"caches": (torch.zeros(9, 5), torch.zeros(9, 4))}, r"was of shape \(9, 4\) and is \(9, 5\)"),
        ({"caches": (torch.zeros(9), torch.zeros(9, 4))}, r"was of shape \('blocks', 4\) and is \(9,\)"),
        ({"caches": (torch.zeros(9, 4),)}, "was a tuple of 2"),
        ({"number": 8}, "was 7 and is 8"),
        ({"number": True}, "was 7 and is True"),
        (
            {"caches": (dynamic(3),) * 2},
            r"argument\[1\]\[1\] was a tensor of its own and is the same as an earlier one",
        ),
    ],
)
def test_a_difference_is_named_and_again_at_the_next_call(changed: dict, said: str) -> None:
    check = ArgumentCheck(arguments())
    others = arguments(**changed)
    for _ in range(2):
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(check.difference(others))
    assert check.difference(arguments()) is None


def test_a_tensor_given_twice_must_be_given_twice_again() -> None:
    tied = torch.zeros(3, 2)
    check = ArgumentCheck((tied, tied))
    other = torch.zeros(3, 2)
    assert check.difference((other, other)) is None
    assert check.difference((tied, other)) == "argument[1] was the same tensor as an earlier one, and is not"
    assert specs_of((tied, tied)) != specs_of((tied, other))


@pytest.mark.parametrize("change", ["resize_", "set_", "data"])
def test_the_same_tensor_changed_in_place_is_a_difference(change: str) -> None:
    args = arguments()
    check = ArgumentCheck(args)
    tensor = args[0].first
    assert check.difference(args) is None
    if change == "resize_":
        tensor.resize_(2, 2)
    elif change == "set_":
        tensor.set_(torch.zeros(4, 4))
    else:
        tensor.data = torch.zeros(2, 3, dtype=torch.int32)
    for _ in range(2):
        assert check.difference(args) is not None
    tensor.data = torch.ones(2, 3)
    assert check.difference(args) is None


class _Binds:
    """A function that counts how it was called, as ``ReadyFunction`` may be: one tensor it looks after itself."""

    def __init__(self, held: Tensor, binds: bool = True) -> None:
        self.calls: list[str] = []
        self._held, self._binds = held, binds

    def __call__(self, *args: Any) -> int:
        self.calls.append("plain")
        return len(args)

    def bind(self, *args: Any) -> tuple[int, Any]:
        self.calls.append("bind")
        return len(args), self if self._binds else None

    def held(self) -> list[Tensor]:
        return [self._held]


def test_arguments_that_come_again_are_bound() -> None:
    """From the second call on, and then torch looks at the other tensors alone."""
    args = arguments()
    check, function = ArgumentCheck(args), _Binds(args[0].first)
    for _ in range(4):
        assert check.difference(args) is None
        assert check.last is not None
        check.last.call(function)
    assert function.calls == ["plain", "bind", "plain", "plain"]
    args[0].first.data = torch.zeros(2, 3, dtype=torch.int32)
    assert check.difference(args) is None, "the function would refuse it"
    args[1][0].data = torch.zeros(7, 7)
    assert check.difference(args) is not None
    check.forget()
    assert check.last is None


def test_long_calls_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_specs, "_LONG", 0)
    args = arguments()
    check, function = ArgumentCheck(args), _Binds(args[0].first)
    for number in range(4):
        if number == 2:
            monkeypatch.setattr(argument_specs, "_LONG", 60)  # the next one is short, and the one after it bound
        assert check.difference(args) is None
        assert check.last is not None
        check.last.call(function)
    assert function.calls == ["plain", "plain", "plain", "bind"]


def test_arguments_of_some_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_specs, "_MOST_SEEN", 2)
    given = {size: (dynamic(size),) for size in (2, 3, 4)}
    check, seen = ArgumentCheck(given[3]), dict[int, list[Any]]()
    for size in (2, 3, 2, 4, 2, 3):
        assert check.difference(given[size]) is None
        seen.setdefault(size, []).append(check.last)
    assert seen[2][0] is seen[2][1] is seen[2][2], "those that were not met for the longest time go first"
    assert seen[3][0] is not seen[3][1]


def test_what_cannot_be_bound_is_called() -> None:
    args = arguments()
    check, function = ArgumentCheck(args), _Binds(args[0].first, binds=False)
    for _ in range(4):
        assert check.difference(args) is None
        assert check.last is not None
        assert check.last.call(function) == len(args)
    assert function.calls == ["plain", "bind", "plain", "plain"]


def test_torchs_state_counts_even_when_the_arguments_are_the_same_objects() -> None:
    args = arguments()
    check = ArgumentCheck(args)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert check.difference(args) == f"torch's number of threads was {threads} and is {threads + 1}"
    finally:
        torch.set_num_threads(threads)
    with torch.autocast("cpu"):
        assert check.difference(args) == "autocast was off and is torch.bfloat16"
    assert check.difference(args) is None


def test_a_spec_makes_a_tensor_of_its_own_kind() -> None:
    marked = dynamic(3)
    torch._dynamo.mark_static_address(marked, guard=False)
    for tensor in (torch.zeros(3, 2).T, torch.zeros(0), marked):
        made = spec_of(tensor).make()
        assert made.shape == tensor.shape
        assert specs_of((made,)) == specs_of((tensor,))
    assert spec_of(dynamic(1)).make().shape == (3, 4), "the example, since torch takes a size of 1 for a constant"


def test_examples_are_other_tensors_of_the_same_specs() -> None:
    tied = torch.zeros(2, 3)
    args = Pair(tied, None), (dynamic(1), tied), 7
    examples = examples_of(args)
    assert specs_of(examples) == specs_of(args)
    assert isinstance(examples[0], Pair)
    assert examples[0].first is examples[1][1] is not tied
    assert examples[1][0].shape == (3, 4)


@pytest.mark.parametrize("is_strided", [True, False])
def test_no_example_of_a_dynamic_size_is_a_stride_of_its_own(is_strided: bool) -> None:
    """As that of the blocks of a KV cache. Strides that follow from sizes may be any."""
    wide, other = torch.zeros(3, 15), torch.zeros(15, 4)
    tensor = wide[:, :4] if is_strided else wide
    mark_dynamic_size(tensor, 0, DynamicSize("blocks", 3))
    mark_dynamic_size(other, 0, DynamicSize("tokens", 15))
    if is_strided:
        with pytest.raises(AssertionError, match=r"^15 is a stride, and the example of the dynamic size 'tokens'"):
            examples_of((tensor, other))
        mark_dynamic_size(other, 0, DynamicSize("tokens", 16))
    assert specs_of(examples_of((tensor, other))) == specs_of((tensor, other))


def test_arguments_of_several_sizes_are_remembered_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the buckets of an engine take turns."""
    several = [arguments(caches=(dynamic(size), dynamic(size))) for size in (1, 3, 8)]
    check = ArgumentCheck(several[0])
    assert [check.difference(args) for args in several] == [None] * 3
    with monkeypatch.context() as patch:
        patch.setattr("compiled_llm.compiling.argument_specs._difference", lambda *_: pytest.fail("compared again"))
        assert [check.difference(args) for args in several * 2] == [None] * 6
    check.forget()
    monkeypatch.setattr("compiled_llm.compiling.argument_specs._difference", lambda *_: " is compared")
    assert [check.difference(args) for args in several] == ["argument is compared"] * 3


def test_what_was_seen_is_not_compared_again_though_a_tensor_occurs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights do. Comparing all of a model's tensors at each step would take milliseconds."""
    tied, other = torch.ones(2, 3), torch.ones(4)
    check = ArgumentCheck(((tied, other), tied))
    assert check.difference(((tied, other), tied)) is None
    monkeypatch.setattr("compiled_llm.compiling.argument_specs._difference", lambda *_: pytest.fail("compared again"))
    assert check.difference(((tied, other), tied)) is None
