"""StoppableText: a text that grows until it holds a stop string."""


class StoppableText:
    """The stop string that is complete first ends the text, before or after it; the longest, where several are complete
    at once.

    A token that is not shown can be part of a stop string too, by a text of its own, as a whole: the text is searched
    once as it is, and once with such tokens in their places.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        """``include_stop``: the text ends after the stop string, not before it."""
        self._stops, self._include_stop = stops, include_stop
        self._longest = max(map(len, stops), default=0)
        self._text = ""  # that is not taken yet: no stop string starts in what is
        self._hidden: list[tuple[int, str]] = []  # where in the text, and its own text; of a place in their order

    def add(self, piece: str, may_stop: bool = True) -> str | None:
        """The text goes on. Returns the stop string that it now holds, if any; the text then ends there.

        Args:
            may_stop: False: a stop string that ``piece`` completes is text like any other.
        """
        length = len(self._text)
        self._hidden = [(place, token) for place, token in self._hidden if place > length - self._longest]
        self._text += piece
        return self._search(length, 0) if may_stop else None

    def add_hidden(self, token: str, may_stop: bool = True) -> str | None:
        """The same for a token that is not shown."""
        self._hidden = [*self._hidden[-self._longest :], (len(self._text), token)]
        return self._search(len(self._text), len(token)) if may_stop else None

    def take(self, finished: bool) -> str:
        """The text since the last call. Unless ``finished``, an end that may become a stop string is held back."""
        end = len(self._text)
        if not finished and self._stops:
            whole = _Whole(self._text, self._hidden)
            starts = [_start_of(self._text, stop) for stop in self._stops]
            if self._hidden:
                starts += [whole.shown(whole.start_of(stop)) for stop in self._stops]
            end = min(starts, default=end)
        taken, self._text = self._text[:end], self._text[end:]
        self._hidden = [(place - end, token) for place, token in self._hidden if place >= end]
        return taken

    def _search(self, num_searched: int, num_hidden: int) -> str | None:
        """Looks for what ends after the first ``num_searched`` characters, or in the last ``num_hidden`` of a token."""
        if not self._stops:
            return None
        whole = _Whole(self._text, self._hidden)
        found = []  # (end, start) in the whole text, stop string, start in the text that is shown
        for stop in self._stops:
            start = self._text.find(stop, max(0, num_searched - len(stop) + 1))
            if start >= 0:
                found.append((whole.before(start + len(stop)), whole.after(start), stop, start))
            if self._hidden:
                searched = len(whole.text) - num_hidden if num_hidden else whole.after(num_searched)
                start = whole.find(stop, max(0, searched - len(stop) + 1))
                if start >= 0:
                    found.append((start + len(stop), start, stop, whole.shown(start)))
        if not found:
            return None
        _, _, stop, start = min(found)
        self._text = self._text[:start] + (stop if self._include_stop else "")
        self._hidden = []
        return stop


class _Whole:
    """A text with the tokens that it does not show.

    Attributes:
        text: all of it.
    """

    def __init__(self, shown: str, hidden: list[tuple[int, str]]) -> None:
        self._hidden = hidden
        pieces: list[str] = []
        self._spans: list[tuple[int, int]] = []
        last = length = 0
        for place, token in hidden:
            pieces += [shown[last:place], token]
            self._spans.append((place + length, place + length + len(token)))
            last, length = place, length + len(token)
        self.text = "".join([*pieces, shown[last:]])

    def before(self, place: int) -> int:
        """A place in the shown text, before tokens that are there -> its place in all of it."""
        return place + sum(len(token) for at, token in self._hidden if at < place)

    def after(self, place: int) -> int:
        """The same after the tokens that are there."""
        return place + sum(len(token) for at, token in self._hidden if at <= place)

    def shown(self, place: int) -> int:
        """The place in the shown text of one in all of it."""
        return place - sum(min(end, place) - start for start, end in self._spans if start < place)

    def is_cut(self, place: int) -> bool:
        """Whether it is inside a token."""
        return any(start < place < end for start, end in self._spans)

    def find(self, stop: str, start: int) -> int:
        """Where ``stop`` is from ``start`` on without a part of a token; -1: nowhere."""
        found = self.text.find(stop, start)
        while found >= 0 and (self.is_cut(found) or self.is_cut(found + len(stop))):
            found = self.text.find(stop, found + 1)
        return found

    def start_of(self, stop: str) -> int:
        """Where the longest end of it starts that ``stop`` starts with, and that begins with no part of a token."""
        start = _start_of(self.text, stop)
        while self.is_cut(start):
            start = _start_of(self.text, stop, start + 1)
        return start


def _start_of(text: str, stop: str, least: int = 0) -> int:
    """Where the longest end of ``text`` starts, from ``least`` on, that ``stop`` starts with; its end if none does."""
    start = text.find(stop[0], max(least, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
