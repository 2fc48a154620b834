"""The turns of a loop that steps an engine, in a thread or in a server's process: what it does before each step."""

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import TypeVar

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.scheduling.worker import LOOK_SECONDS

Command = TypeVar("Command")


def commands_of_turn(engine: CompiledEngine, commands: "SimpleQueue[Command]") -> Iterator[Command]:
    """The commands to take before the next step; with no step to run, waits for one.

    Commands that come meanwhile are left for the next turn, so that they cannot keep steps from running. While there is
    nothing to do, blocks move on, memory is asked for, and code that is compiled beside takes over.
    """
    goes_on = engine.has_unfinished_requests() or engine.move_blocks() or engine.ask_for_memory()
    most_seconds = LOOK_SECONDS if engine.is_changing else None
    for _ in range(max(commands.qsize(), 0 if goes_on else 1)):
        try:
            command = commands.get(timeout=most_seconds)
        except Empty:
            return
        yield command
