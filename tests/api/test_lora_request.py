"""LoRARequest: what it refuses, and how one or several are given."""

from pathlib import Path
from typing import Any

import pytest

from compiled_llm.api.lora_request import LoRARequest, pair_lora_requests

ONE, OTHER = LoRARequest("one", "path"), LoRARequest("other", "path")


def test_a_path_may_be_one_of_pathlib() -> None:
    assert LoRARequest("one", Path("path")) == ONE  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("", "path", "lora_name must be 1 to 256 printable characters"),
        ("x" * 257, "path", "lora_name must be"),
        ("a\n", "path", "lora_name must be"),
        (1, "path", "lora_name must be"),
        ("one", "", "lora_path must be the directory of an adapter"),
        ("one", 1, "lora_path must be"),
    ],
)
def test_what_is_refused(name: Any, path: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(name, path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, [None, None]), (ONE, [ONE, ONE]), ([ONE, None], [ONE, None]), ((OTHER, ONE), [OTHER, ONE])],
)
def test_one_for_all_or_one_for_each(given: Any, expected: list[LoRARequest | None]) -> None:
    assert pair_lora_requests(given, 2) == expected


@pytest.mark.parametrize("given", [[ONE], [ONE, "x"], "ab", 3, {"one": ONE}])
def test_others_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="lora_request must be a LoRARequest"):
        pair_lora_requests(given, 2)
