"""Experts that lie in one tensor of a checkpoint."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from compiled_llm.models.linears.protocol import Put, PutQuantized, StoredLinear
from compiled_llm.models.quantized.mxfp4 import StackedMxfp4
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.reader import Reader, Stack, Wanted
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat

_COLUMNS = 64  # of a matrix that are transposed at a time, in the caches


class StackedTake:
    """What experts take of the one tensor ``wanted`` and the ``biases`` of all. Names of parts end in the number.

    Matrices that lie transposed come as a whole.
    """

    def __init__(self, reader: Reader, wanted: Wanted, biases: Tensor | None, in_turn: int) -> None:
        self.dtype, self.device = reader.dtype, reader.device
        self._reader, self._wanted, self._biases, self._in_turn = reader, wanted, biases, in_turn

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self._biases is not None
        bias = self._biases[int(name.removesuffix(".bias").rpartition(".")[2])]
        return bias if bias.is_meta else bias.view(-1, self._in_turn).t().flatten()

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return scheme.form

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        if not isinstance(scheme, StackedMxfp4):
            raise ValueError(
                f"config.json: quantization_config quantises {self._wanted.name}, experts that lie in one tensor, "
                "which is read with quant_method 'mxfp4' alone. Load a checkpoint that has these experts plainly"
            )
        stack = Stack(int(part.name.rpartition(".")[2]), self._wanted.shape[0])

        def put_in_order(first: int, rows: QuantizedRows) -> None:
            for row, own in _in_turn(first, part.out_features, self._in_turn):
                if len(codes := rows.codes[own]):
                    put(row, QuantizedRows(codes, rows.scales[own]))

        name, sizes = self._wanted.name, (part.out_features, part.in_features)
        return self._reader.quantized(name, scheme, *sizes, put_in_order, stack)

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        """``shapes`` are those of all experts, in their order."""
        assert len(shapes) == self._wanted.shape[0]
        out_features = next(iter(shapes.values()))[0]

        def put_in_order(start: int, rows: Tensor) -> None:
            expert, first = divmod(start, out_features)
            for row, own in _in_turn(first, out_features, self._in_turn):
                if len(of_part := rows[own]):
                    put(expert * out_features + row, of_part.contiguous())

        def put_columns(start: int, rows: Tensor) -> None:
            begin = start // len(rows) * out_features
            for column in range(0, out_features, _COLUMNS):
                # torch transposes what lies together eight times as fast.
                columns = rows[:, column : column + _COLUMNS].contiguous().t().contiguous()
                put_in_order(begin + column, columns)

        self._reader.rows([self._wanted], put_columns if self._wanted.whole else put_in_order)


def _in_turn(first: int, out_features: int, parts: int) -> Iterator[tuple[int, slice]]:
    """For rows of a matrix from ``first`` on: which of them each part has, and where the first of these belongs."""
    for part in range(parts):
        skipped = (part - first) % parts
        yield part * (out_features // parts) + (first + skipped) // parts, slice(skipped, None, parts)
