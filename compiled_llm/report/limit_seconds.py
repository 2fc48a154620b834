"""LimitSeconds: how long an engine's steps would have taken at the machine's limits, for who asks again and again."""

from compiled_llm.report.machine_limits import MachineLimits
from compiled_llm.report.roofline import ModelWork
from compiled_llm.report.step_log import StepLog, StepRow


class LimitSeconds:
    """Of one log of steps. Only rows that have grown since the last time are computed again."""

    def __init__(self, work: ModelWork, limits: MachineLimits) -> None:
        self._work, self._rates = work, (limits.read_bytes_per_second, limits.flops_per_second)
        self._known: dict[StepRow, tuple[int, float]] = {}  # number of steps, and the seconds for these

    def total(self, log: StepLog) -> tuple[float, float]:
        """The seconds at the limits, and those that the device took."""
        rows, known = log.rows(), self._known
        self._known = {
            row: known[row] if row in known and known[row][0] == row.count else self._of(row) for row in rows
        }
        return sum(seconds for _, seconds in self._known.values()), sum(row.seconds for row in rows)

    def _of(self, row: StepRow) -> tuple[int, float]:
        return row.count, self._work.seconds(row.work(), *self._rates)
