"""Names of tensors: the hub's, as families ask for them, and GGUF's, with what a file changed in them."""

import re
from collections import Counter
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
    "dt_bias": "dt_proj.bias",
    ".expert_bias": ".expert_bias.bias",
}
# Of Nemotron-H's experts the table has the names that llama.cpp's converter gives them.
_OF_EXPERTS = re.compile(r"backbone\.(layers\.\d+)\.mixer\.experts\.")
# Tensors that newer files have in one, one below the other.
_FUSED = {"ffn_gate_exps": "ffn_gate_up_exps", "ffn_up_exps": "ffn_gate_up_exps"}
_FUSED |= dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn_qkv")
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read with the config


class Place(NamedTuple):
    """Where a tensor of the hub's layout is in a GGUF file.

    Attributes:
        tensor: its name there.
        part: which matrix of a tensor of several, one for each expert; None: the whole.
        shape: that it has in the hub's layout.
        first: its first row, where the tensor holds others before it.
        heads: rows of each of so many heads lie in pairs; 0: in order.
        change: what is made of its elements, as ``StoredTensor`` has it.
    """

    tensor: str
    part: int | None
    shape: tuple[int, ...]
    first: int = 0
    heads: int = 0
    change: str = ""


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
    rows: Counter[tuple[str, int | None]] = Counter()  # of a tensor that have their place
    for name, part in wanted.items():
        expert = _EXPERT.search(name)
        plain = name if expert is None else name.replace(expert[0], ".experts.")
        for own, spelt in _SPELT.items():
            plain = plain.replace(own, spelt)
        plain = _OF_EXPERTS.sub(r"model.\1.mlp.experts.", plain)
        suffixes = (".weight", ".bias")
        usual = table.get_name(plain, suffixes) or table.get_name(plain.removeprefix("model."), suffixes)
        tensor = _held(usual, header)
        if tensor is None:
            continue
        number, shape = int(expert[1]) if expert else None, part.shapes[0]
        place = Place(tensor, number, shape, rows[tensor, number])
        rows[tensor, number] += shape[0]
        if architecture.in_pairs and usual is not None and (which := re.search(r"\.attn_([qk])\.", usual)):
            place = place._replace(heads=config.num_heads if which[1] == "q" else config.num_kv_heads)
        if architecture.plus_one and tensor.endswith("norm.weight") and not tensor.endswith(".ssm_norm.weight"):
            place = place._replace(change="less_one")
        found[name] = place._replace(change="log_of_negative") if name.endswith(".A_log") else place
    used = {place.tensor for place in found.values()}
    unused = [name for name in header.tensors if name not in used and not _is_unused(name, config.num_layers)]
    return found, unused


def _held(name: str | None, header: Header) -> str | None:
    """The tensor of a file that ``name`` means: itself, with an end that tables leave out, or what holds it."""
    if name is None:
        return None
    layer, _, what = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
    fused = name.replace(f"{layer}.{what}", f"{layer}.{_FUSED.get(what, what)}")
    return next((one for one in (name, f"{name}.weight", fused) if one in header.tensors), None)


def _is_unused(name: str, num_layers: int) -> bool:
    """Whether it is read with the config, or belongs to a layer that guesses the token after the next."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return name.endswith(_UNUSED) or (layer is not None and int(layer[1]) >= num_layers)
