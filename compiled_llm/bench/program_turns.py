"""Several programs prepare at the same time, then measure one after the other: ``gpu_validate.py`` gives the turns.

A program calls ``wait_for_turn`` when its model is loaded and its code compiled. Run by itself it goes on at once.
"""

import os
import sys
import time
from pathlib import Path

VARIABLE = "COMPILED_LLM_TURN"  # of the environment: the path of a program's turn, without an ending


def ready_file(turn: Path) -> Path:
    """Made by the program that waits."""
    return turn.with_name(f"{turn.name}.ready")


def go_file(turn: Path) -> Path:
    """Made by the program that gives the turn."""
    return turn.with_name(f"{turn.name}.go")


def wait_for_turn() -> None:
    """Return when it is this program's turn to measure. It ends with the program that gives the turns."""
    if VARIABLE not in os.environ:
        return
    turn, giver = Path(os.environ[VARIABLE]), os.getppid()
    ready_file(turn).touch()
    while not go_file(turn).exists():
        if os.getppid() != giver:
            sys.exit("turns: the program that gives the turns has ended")
        time.sleep(0.01)
