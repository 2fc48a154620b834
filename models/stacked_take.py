"""Experts that lie in one tensor of a checkpoint."""

from collections.abc import Mapping

from torch import Tensor

from compiled_llm.models.linears.protocol import Part, Put, PutQuantized
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.reader import Reader, Wanted

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

    def quantized(self, part: Part, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        raise ValueError(f"quantised weights are not read for experts that lie in one tensor, {self._wanted.name}")

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        """``shapes`` are those of all experts, in their order."""
        assert len(shapes) == self._wanted.shape[0]
        out_features = next(iter(shapes.values()))[0]
        size = out_features // self._in_turn

        def put_in_order(start: int, rows: Tensor) -> None:
            expert, first = divmod(start, out_features)
            for part in range(self._in_turn):
                skipped = (part - first) % self._in_turn
                of_part = rows[skipped :: self._in_turn]
                if len(of_part):
                    row = part * size + (first + skipped) // self._in_turn
                    put(expert * out_features + row, of_part.contiguous())

        def put_columns(start: int, rows: Tensor) -> None:
            begin = start // len(rows) * out_features
            for column in range(0, out_features, _COLUMNS):
                # torch transposes what lies together eight times as fast.
                columns = rows[:, column : column + _COLUMNS].contiguous().t().contiguous()
                put_in_order(begin + column, columns)

        self._reader.rows([self._wanted], put_columns if self._wanted.whole else put_in_order)
