"""What the machine code of a kernel consists of, read from the disassembler's text (SASS)."""

import collections
import dataclasses
import re

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
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA(?:\.\w+)*\b.*?0x([0-9a-f]+)")


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


def read_sass(text: str) -> tuple[Code, Code | None]:
    """All of a kernel's code; and its main loop: of the innermost ones with most matrix products the shortest, or the
    longest if none has any."""
    lines = [(int(address, 16), instruction) for address, instruction in _LINE.findall(text)]
    instructions = [re.sub(r"^@!?U?P\w+\s+", "", instruction) for _, instruction in lines]
    places = {address: place for place, (address, _) in enumerate(lines)}
    loops = []
    for place, instruction in enumerate(instructions):
        branch = _BRANCH.search(instruction)
        start = places.get(int(branch[1], 16), place) if branch else place
        if start < place:
            loops.append((start, place + 1))
    inner = [loop for loop in loops if not any(loop != one and loop[0] <= one[0] < one[1] <= loop[1] for one in loops)]
    bodies = [_code(instructions[start:end]) for start, end in inner]
    with_products = [body for body in bodies if body.counts["tensor"]]
    if with_products:
        main: Code | None = max(with_products, key=lambda body: (body.counts["tensor"], -body.size))
    else:
        main = max(bodies, key=lambda body: body.size, default=None)
    return _code(instructions), main


def class_of(instruction: str) -> str:
    """The one of ``CLASSES`` that an instruction belongs to, by its name."""
    name = instruction.split()[0]
    if name.startswith(_FIRST):
        return "conversion" if name.startswith("FRND") else "control"
    return next((kind for kind, prefixes in _PREFIXES.items() if name.startswith(prefixes)), "integer")


def _code(instructions: list[str]) -> Code:
    counts = collections.Counter(map(class_of, instructions))
    loads = [instruction.split()[0] for instruction in instructions if instruction.startswith(("LDG.", "LDGSTS"))]
    widths = collections.Counter(map(_width, loads))
    asynchronous = any(load.startswith("LDGSTS") for load in loads)
    return Code({kind: counts[kind] for kind in CLASSES}, dict(widths), asynchronous)


def _width(load: str) -> int:
    parts = load.split(".")
    bits = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
    return next((bits[part] // 8 for part in parts if part in bits), 4)
