"""What parts a kernel's machine code has, and which of them run how often: from its jumps and its line numbers.

A part is all blocks (instructions without a jump in between) that lie in the same loops and come from the same
functions. Loops are natural ones: what leads back to where a jump backwards goes.
"""

import ast
import functools
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from compiled_llm.gpu_step.sass import Code, Instruction, code_of

_PACKAGE = Path(__file__).parents[1]  # whose files have the kernels
# Functions whose loops come before or after the main one, though some have more products. ``estimate.py`` refuses a
# kernel with such a loop in another function.
BESIDES = frozenset(
    {
        "inverse_rms_of_rows",
        "scales_of_rows",
        "merge",
        "_merge_heads",
        "_rest",
        "choose",
        "shrink",
        "times_a",
        "shrink_rows",
        "changes_of",
        "wait_for_programs",
        "wait_for_ranks",
        "sum_section",
        "gather_sections",
        "expand",
        "_ask_for_b",
    }
)


class CodePart(NamedTuple):
    """Attributes:

    place: "main" for the main loop: of the innermost ones outside of ``BESIDES`` with most matrix products the
        shortest, or the longest if none has any; "task" for what else is in a loop around it; "once" for the rest;
        "called" for subroutines, the slow ways of divisions and roots, which ordinary numbers do not take.
    looped: whether it is in a loop that has no part of the main loop.
    functions: of the package, that most of a block's instructions are in; ``looping``: those of them with a loop.
    """

    place: str
    looped: bool
    functions: frozenset[str]
    looping: frozenset[str]
    code: Code


class Flow(NamedTuple):
    """A kernel: all of its code, its main loop if it has one, and both in parts."""

    code: Code
    loop: Code | None
    parts: tuple[CodePart, ...]


class _Block(NamedTuple):
    start: int
    end: int
    next: tuple[int, ...]  # addresses


def read_flow(instructions: Sequence[Instruction]) -> Flow:
    """``instructions``: of one kernel, its subroutines after it."""
    by_address = {instruction.address: n for n, instruction in enumerate(instructions)}
    blocks = [block for block in _blocks(instructions, by_address) if block.end > block.start]
    loops = _loops(blocks, [instructions[block.start].address for block in blocks])
    bodies = [_code(instructions, (blocks[n] for n in loop)) for loop in loops]
    functions = [_functions_of(instructions[block.start : block.end]) for block in blocks]
    looping = [_looping_of(instructions[block.start : block.end]) & functions[n] for n, block in enumerate(blocks)]
    inner = [
        n
        for n, loop in enumerate(loops)
        if not any(other < loop for other in loops) and not all(functions[place] & BESIDES for place in loop)
    ]
    main = _main_loop(inner, bodies)
    keyed: dict[tuple[str, bool, frozenset[str], frozenset[str]], list[_Block]] = {}
    for n, block in enumerate(blocks):
        around = [loop for loop in loops if n in loop]
        place = "once"
        if instructions[block.start].is_called:
            place = "called"
        elif main is not None and n in loops[main]:
            place = "main"
        elif main is not None and any(loops[main] < loop for loop in around):
            place = "task"
        looped = place != "main" and any(main is None or not loops[main] <= loop for loop in around)
        keyed.setdefault((place, looped, functions[n], looping[n]), []).append(block)
    parts = tuple(CodePart(*key, _code(instructions, of_part)) for key, of_part in keyed.items())
    return Flow(code_of(instructions), None if main is None else bodies[main], parts)


def _code(instructions: Sequence[Instruction], blocks: Iterable[_Block]) -> Code:
    return code_of([instruction for block in blocks for instruction in instructions[block.start : block.end]])


def _main_loop(inner: Sequence[int], bodies: Sequence[Code]) -> int | None:
    with_products = [n for n in inner if bodies[n].counts["tensor"]]
    if with_products:
        return max(with_products, key=lambda n: (bodies[n].counts["tensor"], -bodies[n].size))
    return max(inner, key=lambda n: bodies[n].size, default=None)


def _blocks(instructions: Sequence[Instruction], by_address: dict[int, int]) -> list[_Block]:
    starts = {0, len(instructions)}
    for n, instruction in enumerate(instructions):
        if instruction.target is not None and instruction.target in by_address:
            starts.add(by_address[instruction.target])
        if instruction.target is not None or instruction.ends:
            starts.add(n + 1)
        if n and instruction.is_called and not instructions[n - 1].is_called:
            starts.add(n)
    blocks, ordered = [], sorted(starts)
    for start, end in itertools.pairwise(ordered):
        last = instructions[end - 1]
        following = [last.target] if last.target is not None else []
        if not last.ends and end < len(instructions):
            following.append(instructions[end].address)
        blocks.append(_Block(start, end, tuple(following)))
    return blocks


def _loops(blocks: Sequence[_Block], addresses: Sequence[int]) -> list[frozenset[int]]:
    """As places in ``blocks``; one of several blocks, or of one that jumps to its own beginning."""
    places = {address: n for n, address in enumerate(addresses)}
    before: list[list[int]] = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        for address in block.next:
            if address in places:
                before[places[address]].append(n)
    found: dict[int, set[int]] = {}
    for head in range(len(blocks)):
        for source in before[head]:
            if source < head or (blocks[head].end - blocks[head].start == 1 and source == head):
                continue  # forwards, or the jump to itself after a kernel's end
            body = {head}
            open_blocks = [source]
            while open_blocks:
                n = open_blocks.pop()
                if n not in body:
                    body.add(n)
                    open_blocks += before[n]
            if 0 not in body or head == 0:
                found.setdefault(head, set()).update(body)
    return [frozenset(body) for body in found.values()]


def _functions_of(instructions: Sequence[Instruction]) -> frozenset[str]:
    names = [{definition.name for definition in _definitions_at(instruction)} for instruction in instructions]
    known = {name for some in names for name in some}
    return frozenset(name for name in known if 2 * sum(name in some for some in names) > len(names))


def _looping_of(instructions: Sequence[Instruction]) -> frozenset[str]:
    found = (definition for instruction in instructions for definition in _definitions_at(instruction))
    return frozenset(definition.name for definition in found if definition.has_loop)


class _Definition(NamedTuple):
    """A function of the package; its lines, and whether its code has a loop when it is compiled."""

    name: str
    start: int
    end: int
    has_loop: bool


def _definitions_at(instruction: Instruction) -> list[_Definition]:
    """Of the functions that it comes from. Paths may be those of another copy of the package: it has the same code."""
    found = (_definition(*line) for line in instruction.lines)
    return [definition for definition in found if definition is not None]


@functools.cache
def _definition(path: str, line: int) -> _Definition | None:
    return next((one for one in _definitions(path) if one.start <= line <= one.end), None)


@functools.cache
def _definitions(path: str) -> tuple[_Definition, ...]:
    file = _PACKAGE / path.rpartition("/compiled_llm/")[2]
    if "/compiled_llm/" not in path or not file.is_file():
        return ()
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return tuple(_Definition(node.name, node.lineno, node.end_lineno or node.lineno, _has_loop(node)) for node in nodes)


def _has_loop(function: ast.FunctionDef) -> bool:
    """``tl.static_range`` is written out instead."""
    nodes = list(ast.walk(function))
    loops = (node for node in nodes if isinstance(node, ast.For))
    remaining = any("static_range" not in ast.unparse(node.iter) for node in loops)
    return remaining or any(isinstance(node, ast.While) for node in nodes)
