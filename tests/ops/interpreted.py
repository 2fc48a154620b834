"""Functions that Triton's interpreter runs, in a process of a test file's own: ``conftest.py`` starts it."""

import json
import sys
import traceback
from collections.abc import Callable, Mapping

import torch


def run(functions: Mapping[str, Callable[[], object]]) -> None:
    """Run those that stdin names, a JSON list in one line; print the traceback of each by its name, "" for none."""

    def outcome(function: Callable[[], object]) -> str:
        try:
            function()
        except Exception:
            return traceback.format_exc()
        return ""

    torch.set_num_threads(1)
    names = json.loads(sys.stdin.readline())
    print(json.dumps({name: outcome(functions[name]) for name in names}))
