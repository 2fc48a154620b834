"""Rows of an Arrow table as Python's values: what a cell cannot be made into is the error of its row alone."""

from collections.abc import Iterator
from typing import Any


def table_rows(table: Any) -> Iterator[dict[str, Any] | ValueError]:
    """For each row its values by the names of the columns, without nulls; or why it cannot be read.

    Args:
        table: a ``pyarrow.Table`` or a ``RecordBatch`` of one.
    """
    try:
        rows = [without_nulls(values) for values in table.to_pylist()]
    except Exception:  # whatever one cell raises: a date that Python has not, text that is not UTF-8
        yield from (_row(table, index) for index in range(table.num_rows))
    else:
        yield from rows


def without_nulls(value: Any) -> Any:
    """Objects without the keys whose value is null: columns that a row has no value of."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _row(table: Any, index: int) -> dict[str, Any] | ValueError:
    values = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            values[name] = without_nulls(column[index].as_py())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return ValueError(
                f"{name:.100} must be a value of JSON, and its {column.type} cannot be read as one: {reason:.200}"
            )
    return without_nulls(values)
