"""Files of KV blocks of which each rank has its part: a block counts as there if the parts of all ranks are."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from compiled_llm.scheduling.worker import FileResult


class RankFiles:
    """Joins what the ranks say of their files, which they read and write each at its own pace.

    Args:
        known: of each rank, the digests of the blocks whose part has a file.

    Attributes:
        there: digests of the blocks all parts of which have one.
    """

    def __init__(self, known: Sequence[Iterable[bytes]]) -> None:
        self._known = [set(own) for own in known]
        self.there = set.intersection(*self._known)
        self.reset()

    def reset(self) -> None:
        """Whatever is being read and written is dropped, as ``FileOutput.resets`` asks of each rank."""
        self._reads = defaultdict[bytes, list[tuple[tuple[int, ...] | None, float]]](list)
        self._writes = defaultdict[bytes, list[bool]](list)

    def joined(self, results: Sequence[FileResult]) -> FileResult:
        """What the results of a step in all ranks say of whole blocks.

        A read or a write has ended once it has in all ranks. Seconds are those of the slowest rank.
        """
        touched = set[bytes]()
        for known, result in zip(self._known, results, strict=True):
            for digest, windows, seconds in result.read:
                self._reads[digest].append((windows, seconds))
            for digest, is_written in result.written:
                self._writes[digest].append(is_written)
            came = {*result.found, *(digest for digest, is_written in result.written if is_written)}
            went = {*result.lost, *(digest for digest, windows, _ in result.read if windows is None)}
            known |= came
            known -= went
            touched |= came | went
        now = {digest for digest in touched if all(digest in known for known in self._known)}
        found, lost = now - self.there, (touched - now) & self.there
        self.there = (self.there | found) - lost
        read = [(digest, *_slowest(self._reads.pop(digest))) for digest in self._ended(self._reads)]
        written = [
            (digest, all(self._writes.pop(digest)) and digest in self.there) for digest in self._ended(self._writes)
        ]
        return FileResult(
            tuple(read),
            tuple(written),
            tuple(found),
            tuple(lost),
            max(result.num_evicted for result in results),
            max(result.file_seconds for result in results),
            max(result.copy_seconds for result in results),
        )

    def _ended(self, parts: dict[bytes, list]) -> list[bytes]:
        return [digest for digest, of_ranks in parts.items() if len(of_ranks) == len(self._known)]


def _slowest(reads: Sequence[tuple[tuple[int, ...] | None, float]]) -> tuple[tuple[int, ...] | None, float]:
    """Windows whose keys all ranks have read; None: some have no file that can be used."""
    found = [set(windows) for windows, _ in reads if windows is not None]
    windows = tuple(sorted(set.intersection(*found))) if len(found) == len(reads) else None
    return windows, max(seconds for _, seconds in reads)
