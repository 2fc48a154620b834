"""SizedInputs: views that end sooner, of which some are kept."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from compiled_llm.worker import sized_inputs
from compiled_llm.worker.sized_inputs import SizedInputs


def make(views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(views)


def test_each_field_ends_with_the_rows_of_its_kind() -> None:
    views = {"ids": torch.arange(6), "table": torch.arange(8).view(4, 2), "seeds": torch.arange(4)}
    inputs = SizedInputs(views, make, (4, 6), {"ids": 1})
    assert {name: view.tolist() for name, view in inputs.first(2, 3).items()} == {
        "ids": [0, 1, 2], "table": [[0, 1], [2, 3]], "seeds": [0, 1],
    }  # fmt: skip
    views["ids"][0] = 9
    assert inputs.first(2, 3)["ids"].tolist() == [9, 1, 2], "they are views"
    assert inputs.first(4, 6) is inputs.whole
    assert inputs.whole["ids"] is views["ids"], "with what the compiler was told of it"


def test_the_inputs_of_the_last_sizes_and_of_all_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sized_inputs, "_MOST_KEPT", 2)
    inputs = SizedInputs({"ids": torch.arange(4)}, make, (4,))
    whole, one, two = inputs.first(4), inputs.first(1), inputs.first(2)
    assert inputs.first(1) is one
    inputs.first(3)
    assert inputs.first(1) is one
    assert inputs.first(2) is not two, "those that were not taken for the longest time go first"
    assert inputs.first(4) is whole
    assert [len(inputs.first(count)["ids"]) for count in (3, 2, 1)] == [3, 2, 1]
