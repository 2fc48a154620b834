"""Regular expressions of configs, which come from a file that nobody vouches for.

They are matched by sets of positions, not by backtracking: the time is bounded by the lengths of pattern and name.
"""

import functools
from collections.abc import Callable

_MOST_CHARACTERS = 500
_MOST_DEPTH = 8  # of groups in groups
_CLASSES = {
    "d": lambda c: c.isdigit(),
    "w": lambda c: c.isalnum() or c == "_",
    "s": lambda c: c.isspace(),
}

Step = Callable[[str, frozenset[int]], frozenset[int]]
"""(text, positions before) -> positions after."""


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches a beginning of ``name``, as ``re.match``.

    Raises:
        ValueError: it has more than literals, ``.``, classes, groups, ``|``, ``* + ?``, ``^`` and ``$``.
    """
    return bool(_compiled(pattern)(name, frozenset([0])))


@functools.lru_cache(1000)
def _compiled(pattern: str) -> Step:
    if len(pattern) > _MOST_CHARACTERS:
        raise _refused(pattern, f"has {len(pattern)} characters")
    parser = _Parser(pattern)
    step = parser.choices(0)
    if parser.at < len(pattern):
        raise _refused(pattern, f"has {pattern[parser.at]!r} without its beginning")
    return step


def _refused(pattern: str, why: str) -> ValueError:
    return ValueError(
        f"config.json: the pattern {pattern!r:.200} of quantization_config {why}; read are patterns of at most "
        f"{_MOST_CHARACTERS} characters of literals, ., [classes], (groups), |, *, +, ?, ^ and $. "
        "Name the modules instead"
    )


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def _next(self) -> str:
        if self.at == len(self.pattern):
            raise _refused(self.pattern, "ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def choices(self, depth: int) -> Step:
        if depth > _MOST_DEPTH:
            raise _refused(self.pattern, "has groups in groups that are too many")
        found = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            found.append(self._sequence(depth))
        return lambda text, places: frozenset().union(*(step(text, places) for step in found))

    def _sequence(self, depth: int) -> Step:
        steps = []
        while self._peek() not in ("", "|", ")"):
            steps.append(self._repeated(depth))

        def run(text: str, places: frozenset[int]) -> frozenset[int]:
            for step in steps:
                if not places:
                    break
                places = step(text, places)
            return places

        return run

    def _repeated(self, depth: int) -> Step:
        step = self._one(depth)
        sign = self._peek()
        if sign == "{":
            raise _refused(self.pattern, "has a count in braces")
        if not sign or sign not in "*+?":
            return step
        self.at += 1
        if self._peek() == "?":
            self.at += 1  # which match is taken does not matter
        if self._peek() and self._peek() in "*+?{":
            raise _refused(self.pattern, "repeats a repetition")
        if sign == "?":
            return lambda text, places: places | step(text, places)

        def closure(text: str, places: frozenset[int]) -> frozenset[int]:
            found = places if sign == "*" else step(text, places)
            fresh = found
            while fresh:
                fresh = step(text, fresh) - found
                found |= fresh
            return found

        return closure

    def _one(self, depth: int) -> Step:
        sign = self._next()
        if sign == "^":
            return lambda text, places: places & {0}
        if sign == "$":
            return lambda text, places: places & {len(text)}
        if sign == "(":
            if self.pattern.startswith("?:", self.at):
                self.at += 2
            elif self._peek() == "?":
                raise _refused(self.pattern, "looks around or names a group")
            step = self.choices(depth + 1)
            if self._next() != ")":
                raise _refused(self.pattern, "has a group without an end")
            return step
        if sign in "*+?{":
            raise _refused(self.pattern, "repeats nothing")
        return _character(self._test(sign))

    def _test(self, sign: str) -> Callable[[str], bool]:
        if sign == ".":
            return lambda c: True
        if sign == "[":
            return self._class()
        if sign == "\\":
            escaped = self._next()
            if escaped in _CLASSES:
                return _CLASSES[escaped]
            if escaped.isalnum():
                raise _refused(self.pattern, f"has \\{escaped}")
            return lambda c: c == escaped
        return lambda c: c == sign

    def _class(self) -> Callable[[str], bool]:
        negated = self._peek() == "^"
        self.at += negated
        tests: list[Callable[[str], bool]] = []
        while (sign := self._next()) != "]" or not tests:
            if self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("", "]"):
                self.at += 1
                low, high = sign, self._next()
                tests.append(lambda c, low=low, high=high: low <= c <= high)  # type: ignore[misc]
            else:
                tests.append(self._test(sign) if sign == "\\" else lambda c, sign=sign: c == sign)  # type: ignore[misc]
        return lambda c: any(test(c) for test in tests) != negated


def _character(test: Callable[[str], bool]) -> Step:
    return lambda text, places: frozenset(p + 1 for p in places if p < len(text) and test(text[p]))
