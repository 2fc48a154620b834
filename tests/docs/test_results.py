"""Results of measurements name no folder of the machine that measured them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT

RESULTS = sorted((ROOT / "docs" / "results").rglob("*.json"))
FOLDER = re.compile(r"(^|[\s=:'\"])/(root|home|work|tmp|Users)(/|$)")


def texts(value: Any) -> list[str]:
    """All strings in it, names of fields among them."""
    if isinstance(value, dict):
        return [*value, *texts(list(value.values()))]
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_no_folder_is_named(path: Path) -> None:
    assert [text for text in texts(json.loads(path.read_text())) if FOLDER.search(text)] == []
