"""An engine for Ray Data: answers beside the rows of a dataset, for data that goes through Ray Data anyway.

``compiled-llm batch --ray`` is the way to serve a file: one output, in which each row is written when it ends, with a
manifest. ``scripts/serve_ray_data.py`` shows this one, with Ray Data's checkpoints.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow  # type: ignore[import-untyped]

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import read_lora_modules
from compiled_llm.api.readable import shown
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.formats import ROW_KEYS, row_of_object
from compiled_llm.offline.order import OrderGain, ordered_for_speed
from compiled_llm.offline.reading import table_rows
from compiled_llm.offline.rows import Row, RowIterator, with_adapter
from compiled_llm.offline.serving import RowServer, check_faults, run_sampling

_INDEX = "index"
_ADDED = ("answer", "error")


class RayDataEngine:
    """For ``ray.data.Dataset.map_batches``, which makes one in each of its actors.

    ``dataset.map_batches(RayDataEngine, fn_constructor_kwargs={...}, batch_format="pyarrow", ...)``

    A call takes a table of rows and returns it with two columns more. Of its columns, ``index``, integers from 0, each
    once in the dataset, decides the seed of a row that samples, as in an output of ``compiled-llm batch``. Those with
    the name of a key of a row (docs/offline.md) are the row; a null is as no key. Others are left alone.

    - ``answer``, a string: the line of JSON that ``compiled-llm batch`` would write for the row;
    - ``error``, a string: why the row has no result; null if it has one.

    Args:
        sampling: arguments of ``SamplingParams``, before what the checkpoint suggests; a row's own go before both.
        max_faults: as ``--max-faults``.
        lora_modules: as ``--lora-modules``, a list of these.
        **engine: arguments of ``CompiledEngine``.

    Raises:
        ValueError: as ``CompiledEngine`` and ``SamplingParams`` raise it.
    """

    def __init__(
        self,
        sampling: Mapping[str, Any] | None = None,
        max_faults: int = 1,
        lora_modules: Sequence[str] = (),
        **engine: Any,
    ) -> None:
        config = EngineConfig(**{"progress": "off", **engine})
        self._sampling, _ = run_sampling(config, sampling or {})
        self._max_faults = max_faults
        self._engine = CompiledEngine.from_config(config)
        self._adapters = read_lora_modules(lora_modules)
        self._server = RowServer(self._engine, self._sampling, self._adapters)

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """
        Raises:
            ValueError: the table cannot be served, whatever its rows are.
            EngineFaultsError: the engine failed in the same way more often than ``max_faults`` allows.
        """
        _check_table(batch)
        rows = [with_adapter(row, self._adapters) for row in _rows_of(batch)]
        ordered = ordered_for_speed(iter(rows), max(1, len(rows)), self._sampling["max_tokens"], OrderGain())
        results = {}
        for result in self._server.serve(RowIterator(ordered)):
            if result is not None:
                results[result.index] = result
                check_faults(self._server.faults, self._max_faults)
        in_order = [results[row.index] for row in rows]
        answers = [result.line.decode().removesuffix("\n") for result in in_order]
        columns = (answers, [result.error for result in in_order])
        for name, values in zip(_ADDED, columns, strict=True):
            batch = batch.append_column(name, pyarrow.array(values, pyarrow.string()))
        return batch

    def close(self) -> None:
        """Give back what the engine holds, as ``CompiledEngine.close`` does."""
        self._engine.close()


def _check_table(batch: Any) -> None:
    if not isinstance(batch, pyarrow.Table):
        raise ValueError(f"batch_format must be 'pyarrow' in map_batches, given batches of {type(batch).__name__}")
    if _INDEX not in batch.column_names or not pyarrow.types.is_integer(batch.schema.field(_INDEX).type):
        given = ", ".join(f"{field.name} ({field.type})" for field in batch.schema)
        raise ValueError(f"the dataset must have a column {_INDEX!r} of integers, given {given}")
    for name in _ADDED:
        if name in batch.column_names:
            raise ValueError(f"the dataset must not have a column {name!r}, which is added: rename it")
    for index, count in Counter(batch.column(_INDEX).to_pylist()).items():
        if index is None or index < 0 or count > 1:
            raise ValueError(f"{_INDEX} must be another integer >= 0 in each row, given {shown(index)} ({count} times)")


def _rows_of(batch: pyarrow.Table) -> Iterator[Row]:
    keys = [name for name in batch.column_names if name in ROW_KEYS]
    for index, values in zip(batch.column(_INDEX).to_pylist(), table_rows(batch.select(keys)), strict=True):
        name = f"row {index}"
        if isinstance(values, ValueError):
            yield Row(index, name, error=str(values))
        else:
            yield row_of_object(index, name, values)
