"""What a GPU may make of ``ops/fetch.py``: copies that come as late as they may, with zeros in the buffer until then.

A CPU copies at ``fetch``, as early as a GPU may. Whatever a step gives at both ends it gives in between.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LateFetches(TorchDispatchMode):
    """While it is entered, and steps run uncompiled, weights come at ``await_fetched``.

    Attributes:
        num_copies: so far; ``num_not_awaited``: those behind which another began before anyone had awaited them.
        under_way: what was begun and not awaited: nothing between two steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_not_awaited = 0
        self.under_way: dict[int, Tensor] = {}  # host tensors, by the addresses of their buffers

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function._schema.name
        if name == "compiled_llm::fetch":
            _, host, buffer = args
            self.num_not_awaited += buffer.data_ptr() in self.under_way
            self.under_way[buffer.data_ptr()] = host
            torch.as_strided(buffer, (buffer.numel(),), (1,)).view(torch.uint8).zero_()
            return None
        if name == "compiled_llm::await_fetched":
            buffer = args[1]
            buffer.copy_(self.under_way.pop(buffer.data_ptr()))
            self.num_copies += 1
            return None
        return function(*args, **(kwargs or {}))
