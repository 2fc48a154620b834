"""SizedInputs: what compiled code reads of a buffer, which on a CPU ends where the rows end that were filled."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from torch import Tensor

_MOST_KEPT = 64  # inputs of other sizes than the buffer's
Input = TypeVar("Input")


class SizedInputs(Generic[Input]):
    """Inputs made of the first rows of tensors. Where code is generic in the sizes, so nothing computes padding.

    Inputs are kept, since arguments that were compared before are not compared again (``ArgumentCheck``): those of the
    64 sizes that were taken last.

    Args:
        views: all rows of each field.
        make: makes an input of such views.
        sizes: of all rows, of one or several kinds: tokens and requests, say.
        kinds: by field, the place in ``sizes`` of its number of rows; 0 where nothing is said.

    Attributes:
        whole: the input of all rows: what code is compiled for.
    """

    def __init__(
        self,
        views: Mapping[Any, Tensor],
        make: Callable[[Mapping[Any, Tensor]], Input],
        sizes: tuple[int, ...],
        kinds: Mapping[Any, int] = MappingProxyType({}),
    ) -> None:
        self._views, self._make, self._sizes, self._kinds = views, make, sizes, kinds
        self.whole = make(views)
        self._kept: dict[tuple[int, ...], Input] = {}

    def first(self, *sizes: int) -> Input:
        """The input of so many rows of each kind."""
        if sizes == self._sizes:
            return self.whole
        known = self._kept.pop(sizes, None)  # and comes behind all others, of which the first is left out
        if known is None:
            if len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            views = {name: view[: sizes[self._kinds.get(name, 0)]] for name, view in self._views.items()}
            known = self._make(views)
        self._kept[sizes] = known
        return known
