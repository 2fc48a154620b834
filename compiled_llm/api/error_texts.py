"""How error messages show what was given: enough of it to be recognised, however large it is."""

import reprlib
from typing import Any

_MAX_CHARACTERS = 200


class _Brief(reprlib.Repr):
    """``repr`` that looks at the first items and characters only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MAX_CHARACTERS
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = self.maxdeque = 20

    def repr_str(self, x: Any, level: int) -> str:
        return repr(x) if len(x) <= _MAX_CHARACTERS else f"{x[:_MAX_CHARACTERS]!r}..."

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of more than 4300 digits, and takes long for those below.
        return repr(x) if x.bit_length() <= 512 else f"an integer of {x.bit_length()} bits"

    repr_bytes = repr_bytearray = repr_str


_BRIEF = _Brief()


def shown(value: Any) -> str:
    """``repr(value)``, cut after some 200 characters; never takes longer for a larger value."""
    text = _BRIEF.repr(value)
    return text if len(text) <= _MAX_CHARACTERS + 5 else f"{text[:_MAX_CHARACTERS]}..."
