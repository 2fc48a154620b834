"""What the machine code of a kernel consists of, read from the disassembler's text (SASS, ``nvdisasm -gi -c``)."""

import collections
import dataclasses
import re
from collections.abc import Sequence

CLASSES = ("memory", "integer", "float", "tensor", "conversion", "exchange", "control")
"""Loads and stores of any memory; integers and addresses (all that has no other place); arithmetic of floating-point
numbers; products on matrix units; conversions between types; exchange between threads; jumps and barriers."""

_PREFIXES = {
    "tensor": ("HMMA", "IMMA", "QMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "OMMA"),
    "memory": ("LDG", "LDS", "STG", "STS", "LDL", "STL", "LD.", "ST.", "ATOM", "RED.", "UTMA", "UBLK", "LDTM", "STTM"),
    "conversion": ("I2F", "F2F", "F2I", "I2I", "F2IP", "I2IP", "FRND", "UI2F", "UF2F", "CVT"),
    "exchange": ("SHFL", "VOTE", "REDUX", "MATCH", "CREDUX"),
    "control": (
        "BRA", "EXIT", "BAR", "WARPSYNC", "BSSY", "BSYNC", "CALL", "RET", "NOP", "SYNCS", "WARPGROUP", "ELECT", "YIELD",
        "JMP", "BRX", "BREAK", "DEPBAR", "LDGDEPBAR", "UTCBAR", "MEMBAR", "ERRBAR", "FENCE", "CCTL", "ACQBULK", "BPT",
    ),
    "float": ("F", "HADD", "HMUL", "HFMA", "HMNMX", "HSET", "DADD", "DMUL", "DFMA", "DSET", "MUFU"),
}  # fmt: skip
_FIRST = ("LDGDEPBAR", "FRND", "FENCE")  # which begin as others do that are looked at before
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\w+|\$\S+):")
_PLACE = re.compile(r'//## File "(.*?)", line (\d+)')
_CALLER = re.compile(r' inlined at "(.*?)", line (\d+)')
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_BRANCH = re.compile(r"^BRA(?:\.\w+)*\s+(.*?)`\((.*?)\)")
_ENDS = ("EXIT", "RET")


@dataclasses.dataclass(frozen=True)
class Code:
    """Instructions of a thread, or of a part of what it runs.

    Attributes:
        counts: by ``CLASSES``.
        loads: bytes of a load from global memory -> how many there are; those that go to shared memory included.
        asynchronous: whether some of these go to shared memory while the thread runs on.
    """

    counts: dict[str, int]
    loads: dict[int, int]
    asynchronous: bool

    @property
    def size(self) -> int:
        return sum(self.counts.values())

    @property
    def bytes_loaded(self) -> int:
        """By a thread, once through."""
        return sum(width * count for width, count in self.loads.items())

    @property
    def load_bytes(self) -> int:
        """The width of the loads that most bytes come by; 0 without any."""
        return max(self.loads, key=lambda width: width * self.loads[width], default=0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Attributes:

    text: without what it depends on.
    lines: of the source it comes from, and of the calls that lead there: (path, line).
    target: the address that it jumps to; None for others, also for calls.
    ends: whether what follows it in memory does not follow it in time.
    is_called: whether it is in a subroutine.
    """

    address: int
    text: str
    lines: tuple[tuple[str, int], ...]
    target: int | None
    ends: bool
    is_called: bool


def read_sass(text: str) -> list[Instruction]:
    """The instructions of a kernel and of its subroutines."""
    labels, found, waiting = dict[str, int](), list[tuple[int, str, tuple[tuple[str, int], ...], bool]](), list[str]()
    lines, named, is_called = tuple[tuple[str, int], ...](), list[tuple[str, int]](), False
    for line in text.splitlines():
        if place := _PLACE.search(line):
            pairs = (place, _CALLER.search(line))
            named += [(pair[1], int(pair[2])) for pair in pairs if pair]
        elif label := _LABEL.match(line):
            waiting.append(label[1])
            is_called = is_called or label[1].startswith("$")
        elif instruction := _INSTRUCTION.match(line):
            address = int(instruction[1], 16)
            labels |= dict.fromkeys(waiting, address)
            lines, named, waiting = tuple(named) or lines, [], []
            found.append((address, instruction[2], lines, is_called))
    return [_instruction(*one, labels) for one in found]


def _instruction(
    address: int, text: str, lines: tuple[tuple[str, int], ...], is_called: bool, labels: dict[str, int]
) -> Instruction:
    plain = _GUARD.sub("", text)
    branch = _BRANCH.match(plain)
    always = plain == text and (branch[1] == "" if branch else plain.startswith(_ENDS))
    return Instruction(address, plain, lines, labels[branch[2]] if branch else None, always, is_called)


def class_of(instruction: str) -> str:
    """The one of ``CLASSES`` that an instruction belongs to, by its name."""
    name = instruction.split()[0]
    if name.startswith(_FIRST):
        return "conversion" if name.startswith("FRND") else "control"
    return next((kind for kind, prefixes in _PREFIXES.items() if name.startswith(prefixes)), "integer")


def code_of(instructions: Sequence[Instruction]) -> Code:
    counts = collections.Counter(class_of(instruction.text) for instruction in instructions)
    names = [instruction.text.split()[0] for instruction in instructions]
    loads = [name for name in names if name.startswith(("LDG.", "LDGSTS"))]
    widths = collections.Counter(map(_width, loads))
    asynchronous = any(load.startswith("LDGSTS") for load in loads)
    return Code({kind: counts[kind] for kind in CLASSES}, dict(widths), asynchronous)


def _width(load: str) -> int:
    parts = load.split(".")
    bits = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
    return next((bits[part] // 8 for part in parts if part in bits), 4)
