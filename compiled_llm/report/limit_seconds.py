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
        rows = log.rows()
        for row in rows:
            if self._known.get(row, (0, 0.0))[0] != row.count:
                self._known[row] = row.count, self._work.seconds(row.work(), *self._rates)
        return sum(self._known[row][1] for row in rows), sum(row.seconds for row in rows)
