"""SchedulerOutputBuilder: a ``SchedulerOutput`` while the scheduler fills it."""

from operator import attrgetter
from typing import TYPE_CHECKING

from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import (
    FileOutput,
    SchedulerOutput,
    StartedRequest,
    StateOutput,
    TableUpdate,
    WindowOutput,
)

if TYPE_CHECKING:
    import numpy as np


class WindowOutputBuilder:
    """The columns of a ``WindowOutput`` while they grow."""

    def __init__(self) -> None:
        self.table_updates: list[TableUpdate] = []
        self.swapped_out: list[tuple[int, int]] = []
        self.swapped_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.moved_keys: list[tuple[int, int]] = []


class StateOutputBuilder:
    """The columns of a ``StateOutput`` while they grow."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: list[tuple[tuple[int, int], ...]] = []
        self.swapped_out: list[tuple[int, int]] = []
        self.swapped_in: list[tuple[int, int]] = []


class SchedulerOutputBuilder:
    """The columns of a ``SchedulerOutput`` while they grow, under the names that they have there."""

    def __init__(self, num_windows: int = 0) -> None:
        self.request_ids: list[RequestId] = []
        self.num_scheduled_tokens: list[int] = []
        self.num_computed_tokens: list[int] = []
        self.num_samples: list[int] = []
        self.feedback: list[int] = []
        self.token_ids: list[int] = []
        self.admissions: list[StartedRequest] = []
        self.table_updates: list[TableUpdate] = []
        self.released_request_ids: list[RequestId] = []
        self.swapped_out: list[tuple[int, int]] = []
        self.swapped_in: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        self.windows = [WindowOutputBuilder() for _ in range(num_windows)]
        self.states = StateOutputBuilder()
        self.files = FileOutput()
        self.moved_sinks: list[tuple[int, int]] = []
        self.masks: list[tuple[int, int, np.ndarray]] = []
        self.prompt_targets: list[tuple[int, int, tuple[int, ...]]] = []
        self.drafts_next = False
        self.adapter_loads: list[tuple[int, str]] = []
        self.uses_adapters = False
        self.trees: list[tuple[int, tuple[int, ...]]] = []
        self.moved_keys: list[tuple[int, int]] = []
        self.known_tokens: list[tuple[int, int, tuple[int, ...]]] = []

    def build(self, *, resets: bool = False) -> SchedulerOutput:
        """The step as it is to be run; what is appended afterwards does not change it."""
        windows = tuple([WindowOutput._make(map(tuple, _columns_of_window(window))) for window in self.windows])
        states = StateOutput._make(map(tuple, _columns_of_states(self.states)))
        columns = map(tuple, _columns_of_step(self))
        return SchedulerOutput._make(
            (*columns, windows, states, self.files, self.drafts_next, self.uses_adapters, resets)
        )


# Those that are lists in a builder, in their order.
_columns_of_window, _columns_of_states = attrgetter(*WindowOutput._fields), attrgetter(*StateOutput._fields)
_columns_of_step = attrgetter(*SchedulerOutput._fields[: SchedulerOutput._fields.index("windows")])
