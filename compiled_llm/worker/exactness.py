"""Whether a request's numbers are the same to the bit in any company, bucket and chunking; where not, why.

All that adds up is an op with one order of operations for every number of rows: row-wise ops, attention and linear
layers on a CPU; on a GPU the row-wise ops, and with the engine argument ``exact`` the others as well.
"""

from typing import NamedTuple

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.ops import native


class Obstacle(NamedTuple):
    """Something whose numbers may depend on the company, and what to do about it."""

    what: str
    remedy: str


def obstacles(
    config: EngineConfig, device: torch.device, linears: LinearKind, model_config: ModelConfig
) -> tuple[Obstacle, ...]:
    """All there are in an engine whose linear layers are of the kind ``linears``. Empty: it is exact.

    Raises:
        ValueError: there is one, and ``config.exact`` asks for none.
    """
    on_gpu, has_kernels = device.type == "cuda", native.is_available("linear_cpu")
    known = (
        (
            on_gpu and not config.exact,
            "linear layers and attention on a GPU choose their kernels by the number of rows",
            "set exact=True",
        ),
        (
            not on_gpu and not has_kernels,
            "no C++ compiler was found, and plain torch takes other products for other numbers of rows",
            "install one (Debian, Ubuntu: apt install g++)",
        ),
        (
            (config.exact if on_gpu else has_kernels) and not linears.is_exact(),
            f"linear layers of the kind {getattr(linears, '__name__', linears)} depend on the number of rows",
            "keep the weights in a kind that does not",
        ),
        (
            isinstance(model_config, TransformersConfig),
            "norms and the like of transformers' modelling code are compiled without an order of their own",
            "choose a model that has a file of its own",
        ),
        (
            bool(config.logits_transforms),
            "logits_transforms are compiled for each bucket, so that tokens sampled after them may depend on it",
            "leave logits_transforms out",
        ),
    )
    found = tuple(Obstacle(what, remedy) for holds, what, remedy in known if holds)
    if config.exact and found:
        reasons = "; ".join(f"{what} ({remedy})" for what, remedy in found)
        raise ValueError(f"exact must be False here, given True: {reasons}")
    return found


def described(found: tuple[Obstacle, ...]) -> str:
    """As "yes", or "no (REASON; REASON)"."""
    return f"no ({'; '.join(obstacle.what for obstacle in found)})" if found else "yes"
