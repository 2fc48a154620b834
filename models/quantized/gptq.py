"""GPTQ and AWQ: codes in words of 32 bits, the inputs down and the outputs across.

GPTQ (AutoGPTQ, GPTQModel): ``qweight`` ``[K * bits / 32, N]``, a word holds inputs that follow one another, the lowest
bits first; ``qzeros`` ``[G, N * bits / 32]``, each less 1 in the format "gptq", as it is in "gptq_v2"; ``scales``
``[G, N]``; ``g_idx`` ``[K]``, the group of each input. AWQ ("gemm"): ``qweight`` ``[K, N / 8]`` and ``qzeros``
``[G, N / 8]``, where the places of a word from the lowest on hold its outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.scheme import (
    StoredPart,
    checked_scales,
    checked_zero,
    group_order,
    kept_group,
    repeat_groups,
    signed,
    unpack_words,
)
from compiled_llm.ops.linear.quantized_weight import DTYPE_NAMES, QuantizedRows, WeightFormat

_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # of AWQ's words
# How a checkpoint was made, which says nothing of how it lies.
_HISTORY = {
    "quant_method", "damp_percent", "damp_auto_increment", "true_sequential", "dataset", "tokenizer", "static_groups",
    "model_name_or_path", "model_file_base_name", "meta", "act_group_aware", "backend", "model_seqlen", "batch_size",
    "block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "max_input_length", "use_exllama",
    "cache_block_outputs", "exllama_config", "use_cuda_fp16", "disable_exllama", "mse", "offload_to_disk",
    "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "quantizer",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Transposed:
    """A layer of either layout.

    Attributes:
        size: inputs that share a scale; -1: all.
        offset: what is added to the stored zero points.
        awq: whether it is AWQ's.
    """

    form: WeightFormat
    size: int
    offset: int = 0
    awq: bool = False
    ordered: bool = False
    activations: str = "model"
    static_activations: bool = False
    in_pieces: str | None = None

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        bits = self.form.bits
        per_word = 32 // bits
        if out_features % per_word or (in_features % per_word and not self.awq):
            raise ValueError(
                f"sizes of a layer must be multiples of {per_word} where {bits} bits are packed in words, found "
                f"{out_features} x {in_features}"
            )
        groups = -(-in_features // self.size) if self.size > 0 else 1
        shape = (in_features, out_features // per_word) if self.awq else (in_features // per_word, out_features)
        found = {
            "qweight": StoredPart((shape,), (torch.int32,)),
            "qzeros": StoredPart(((groups, out_features // per_word),), (torch.int32,)),
            "scales": StoredPart(((groups, out_features),)),
        }
        if not self.awq:
            # Without desc_act it is left out by some, and says nothing new where it is there.
            found["g_idx"] = StoredPart(((in_features,),), (torch.int32, torch.int64), required=self.ordered)
        return found

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        # Zero points of 8 bits are up to 128 with the 1 that "gptq" takes off: bfloat16 holds whole numbers up to 256.
        zero_dtype = "bfloat16" if self.form.bits == 8 and self.offset else "int8"
        return self.form._replace(scale_dtype=DTYPE_NAMES[dtypes["scales"]], zero_dtype=zero_dtype)

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        g_idx = tensors.get("g_idx")
        return None if g_idx is None else group_order(g_idx, self.size, "g_idx")

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        bits, outputs = self.form.bits, slice(first, first + count)
        if self.awq:
            codes = signed(_outputs_in_order(tensors["qweight"])[:, outputs].t().contiguous(), bits)
            zeros = _outputs_in_order(tensors["qzeros"])[:, outputs]
        else:
            codes = signed(unpack_words(tensors["qweight"][:, outputs].t(), bits), bits)
            zeros = unpack_words(tensors["qzeros"], bits)[:, outputs]
        order = self.order(tensors)
        if order is not None:
            codes = codes[:, order]
        middle = 1 << bits - 1
        groups = self.form.num_groups(codes.shape[1])
        times = self.size // self.form.group_size if self.form.group_size else 1
        scales = checked_scales(tensors["scales"][:, outputs], "scales").t()
        zero_points = zeros.t().float() + (self.offset - middle)
        if not self.form.zeros:
            checked_zero(zero_points + (middle - self.offset), middle - self.offset, "qzeros")
            return QuantizedRows(codes, repeat_groups(scales, times, groups))
        return QuantizedRows(codes, repeat_groups(scales, times, groups), repeat_groups(zero_points, times, groups))


def _outputs_in_order(words: Tensor) -> Tensor:
    """AWQ's words ``[n, w]`` -> ``[n, 8 w]`` uint8."""
    places = unpack_words(words, 4).view(len(words), -1, 8)
    return places[:, :, list(_PLACE_OF_OUTPUT)].flatten(1)


def read_gptq(config: Mapping[str, Any]) -> tuple[Transposed, tuple[str, ...], tuple[str, ...] | None]:
    """The scheme, patterns of modules that are not quantised, and parts of names of those that are (None: all)."""
    allowed = {"bits", "group_size", "desc_act", "sym", "format", "checkpoint_format", "dynamic", "pack_dtype",
               "modules_in_block_to_quantize", "lm_head", "is_marlin_format"}  # fmt: skip
    fields.known(config, allowed | _HISTORY, "quant_method 'gptq'")
    bits = fields.choice(config, "bits", [4, 8])
    fields.choice(config, "lm_head", [False], False)
    fields.choice(config, "is_marlin_format", [False], False)
    fields.choice(config, "pack_dtype", ["int32"], "int32")
    given = fields.whole(config, "group_size", 128)
    size, _ = kept_group(given, "group_size of quantization_config")
    symmetric = fields.choice(config, "sym", [True, False], True)
    ordered = fields.choice(config, "desc_act", [True, False], False)
    name = "checkpoint_format" if config.get("checkpoint_format") else "format"
    layout = fields.choice(config, name, ["gptq", "gptq_v2"], "gptq")
    form = WeightFormat(f"int{bits}", size, zeros=not symmetric)
    scheme = Transposed(form, given, offset=1 if layout == "gptq" else 0, ordered=ordered)
    skipped = []
    for pattern in fields.table(config.get("dynamic") or {}, "dynamic"):
        if not pattern.startswith("-:"):
            raise ValueError(
                f"config.json: dynamic of quantization_config must have keys that begin with '-:' (modules that are "
                f"not quantised), given {pattern!r:.200}"
            )
        skipped.append(f"re:{pattern[2:]}")
    only = config.get("modules_in_block_to_quantize")
    if only is None:
        return scheme, tuple(skipped), None
    flat = (
        [name for part in only for name in (part if isinstance(part, list) else [part])] if type(only) is list else only
    )
    return scheme, tuple(skipped), fields.names({"modules_in_block_to_quantize": flat}, "modules_in_block_to_quantize")


def read_awq(config: Mapping[str, Any]) -> tuple[Transposed, tuple[str, ...]]:
    """The scheme, and patterns of modules that are not quantised."""
    allowed = {"bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format",
               "modules_to_not_convert", "desc_act", "sym"}  # fmt: skip
    fields.known(config, allowed | _HISTORY, "quant_method 'awq'")
    fields.choice(config, "w_bit" if "w_bit" in config else "bits", [4], 4)
    fields.choice(config, "version" if config.get("version") else "format", ["gemm", "GEMM"], "gemm")
    fields.choice(config, "desc_act", [False], False)
    fields.choice(config, "zero_point", [True, False], True)
    name = "q_group_size" if "q_group_size" in config else "group_size"
    given = fields.whole(config, name, 128)
    size, _ = kept_group(given, f"{name} of quantization_config")
    # Without zero points the words of qzeros hold the middle, as they may in other files: they are read in any case.
    return Transposed(WeightFormat("int4", size, zeros=True), given, awq=True), fields.names(
        config, "modules_to_not_convert"
    )
