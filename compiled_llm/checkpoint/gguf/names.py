"""Names of tensors: the hub's, as families ask for them, and GGUF's, with what a file changed in them."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from compiled_llm.checkpoint.gguf.architectures import Architecture
from compiled_llm.checkpoint.gguf.header import Header
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.quantized.scheme import StoredPart

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Parts of names that the library's table has otherwise.
_SPELT = {
    "e_score_correction_bias": "e_score_correction.bias",
    "dt_bias": "dt.bias",
    ".expert_bias": ".expert_bias.bias",
}
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read with the config


class Place(NamedTuple):
    """Where a tensor of the hub's layout is in a GGUF file.

    Attributes:
        tensor: its name there.
        part: which matrix of a tensor of several, one for each expert; None: the whole.
        shape: that it has in the hub's layout.
        heads: rows of each of so many heads lie in pairs; 0: in order.
        plus: what has to be added to its elements.
    """

    tensor: str
    part: int | None
    shape: tuple[int, ...]
    heads: int = 0
    plus: float = 0.0


def places(
    header: Header, architecture: Architecture, config: ModelConfig, wanted: Mapping[str, StoredPart]
) -> tuple[dict[str, Place], list[str]]:
    """Name in the hub's layout -> place, of the tensors of ``wanted`` that the file has; and what it has besides."""
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    kind = {name: one for one, name in MODEL_ARCH_NAMES.items()}[header.metadata["general.architecture"]]
    assert isinstance(kind, MODEL_ARCH)
    table = get_tensor_name_map(kind, config.num_layers)
    found: dict[str, Place] = {}
    for name, part in wanted.items():
        expert = _EXPERT.search(name)
        plain = name if expert is None else name.replace(expert[0], ".experts.")
        for own, usual in _SPELT.items():
            plain = plain.replace(own, usual)
        suffixes = (".weight", ".bias")
        tensor = table.get_name(plain, suffixes) or table.get_name(plain.removeprefix("model."), suffixes)
        if tensor not in header.tensors:
            continue
        place = Place(tensor, int(expert[1]) if expert else None, part.shapes[0])
        if architecture.in_pairs and (which := re.search(r"\.attn_([qk])\.", tensor)):
            place = place._replace(heads=config.num_heads if which[1] == "q" else config.num_kv_heads)
        if architecture.plus_one and tensor.endswith("norm.weight"):
            place = place._replace(plus=-1.0)
        found[name] = place
    used = {place.tensor for place in found.values()}
    return found, [name for name in header.tensors if name not in used and not _is_unused(name, config.num_layers)]


def _is_unused(name: str, num_layers: int) -> bool:
    """Whether it is read with the config, or belongs to a layer that guesses the token after the next."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return name.endswith(_UNUSED) or (layer is not None and int(layer[1]) >= num_layers)
