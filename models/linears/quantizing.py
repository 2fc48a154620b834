"""A kind of linear layer that quantises: which layers, how, and from what."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.experts import take_biases
from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.linears.parts import take_bias, weight_shapes
from compiled_llm.models.linears.protocol import AroundKind, GroupedLinear, Linear, LinearKind, StoredLinear, Take
from compiled_llm.models.linears.quantized import Joined, Quantized, QuantizedExperts, Scheme
from compiled_llm.models.linears.rounding import RowErrors, row_errors
from compiled_llm.models.linears.sharded import CutTake
from compiled_llm.ops.linear.quantized_layouts import empty_quantized, pack_quantized_rows, quantize_into
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat
from compiled_llm.ops.linear.searched_scales import quantize_searched

_INT4 = WeightFormat("int4", 32, zeros=True, scale_dtype="bfloat16", zero_dtype="bfloat16")
SCHEMES = {
    "int8": Scheme(WeightFormat("int8")),
    "int8_w8a8": Scheme(WeightFormat("int8", 128, scale_dtype="bfloat16"), "int8_groups"),
    "int4": Scheme(_INT4),
    "int4_w4a8": Scheme(_INT4, "int8_groups"),
    "fp8": Scheme(WeightFormat("fp8")),
    "mxfp4": Scheme(WeightFormat("fp4", 32, scale_dtype="bfloat16")),
}
"""What the engine argument ``quantization`` names."""
KINDS = {**SCHEMES, "int8_w8a8_rows": Scheme(WeightFormat("int8"), "int8")}
"""These, and what checkpoints have: W8A8 with a scale for each output and each token."""
_FINER = Scheme(WeightFormat("int8", 32, scale_dtype="bfloat16"), "int8_groups")
"""In the place of "int8_w8a8" for the head and for what makes queries, keys and values: their inputs have the largest
outliers of trained models, and no group of more inputs keeps the others precise."""
_OF_ATTENTION = ("*.q_proj", "*.k_proj", "*.v_proj", "*.qkv_proj", "*.query_key_value", "*.c_attn")

# Layers that choose experts: small, and the choice is sensitive.
ROUTERS = ("*.gate", "*.router", "*.router.proj", "*.shared_expert_gate")


def names(pattern: str, part: StoredLinear) -> bool:
    """Whether a pattern of ``quantization_skip`` matches any part of a layer's name between dots."""
    for name in filter(None, (part.name, part.also)):
        words = name.split(".")
        runs = (".".join(words[i:j]) for i, j in itertools.combinations(range(len(words) + 1), 2))
        if any(fnmatchcase(run, pattern) for run in runs):
            return True
    return False


def check_skip(skip: Sequence[str], parts: Sequence[StoredLinear]) -> None:
    """``ValueError`` for a pattern of ``quantization_skip`` that names none of a model's layers ``parts``."""
    for pattern in skip:
        if any(names(pattern, part) for part in parts):
            continue
        called = [name for part in parts for name in (part.name, part.also) if name]
        kinds = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in called)
        shown = f"{', '.join(kinds):.1000}" or "none: the checkpoint keeps all of them quantised"
        raise ValueError(
            f"quantization_skip must name layers that are rounded at load, or parts of their names between dots, given "
            f"{pattern!r:.200}, which names none. Leave it out, or choose of (* stands for numbers): {shown}"
        )


@dataclasses.dataclass(frozen=True)
class Quantizing(AroundKind):
    """A ``LinearKind`` that rounds weights to the nearest values of a format as they are read.

    Attributes:
        plain: the kind of layers that stay in the model's dtype.
        layers, head, embedding: how linear layers are kept, the head, and an embedding that is not the head as well.
            None: in the model's dtype.
        dtype: the model's. Layers that a family takes in another one stay in it.
        skip: patterns of names of layers that stay in the model's dtype; ``*`` stands for anything. A pattern may be
            any part of a name between dots: ``layers.1`` stands for all linear layers of that layer. ``check_skip``
            has checked them.
        errors: what rounding changed, of the layers that have been taken but for heads and embeddings.
    """

    plain: LinearKind
    dtype: torch.dtype
    layers: Scheme | None
    head: Scheme | None = None
    embedding: Scheme | None = None
    skip: tuple[str, ...] = ()
    errors: list[RowErrors] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def scheme(self, part: StoredLinear) -> Scheme | None:
        """How a layer is kept; None: in the model's dtype."""
        of_role = {"head": self.head, "embedding": self.embedding}
        chosen = of_role.get(part.role, self.layers)
        if chosen is None or any(fnmatchcase(part.name, pattern) for pattern in ROUTERS):
            return None
        if any(names(pattern, part) for pattern in self.skip):
            return None
        is_finer = part.role == "head" or any(fnmatchcase(part.name, pattern) for pattern in _OF_ATTENTION)
        return _FINER if is_finer and chosen == SCHEMES["int8_w8a8"] else chosen

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        schemes = {self.scheme(part) for part in parts}
        if len(schemes) > 1:
            return Joined(tuple(self.take(take, [part]) for part in parts))
        (scheme,) = schemes
        if scheme is None or take.dtype != self.dtype:
            return self.plain.take(take, parts)
        out_features, in_features = sum(part.out_features for part in parts), parts[0].in_features
        form = scheme.form
        weight = empty_quantized(form, out_features, in_features, take.device)

        def place(start: int) -> tuple[QuantizedWeight, int, str]:
            return weight, start, parts[0].name if parts[0].role == "layer" else ""

        self._round(take, weight_shapes(parts), form, place)
        return Quantized(weight, take_bias(take, parts), scheme, out_features, in_features, str(take.dtype)[6:])

    def _round(
        self,
        take: Take,
        shapes: Mapping[str, tuple[int, ...]],
        form: WeightFormat,
        place: Callable[[int], tuple[QuantizedWeight, int, str]],
    ) -> None:
        """Take the matrices of ``shapes``; ``place``: first row -> where it goes, and whose errors are noted."""

        def put(start: int, rows: Tensor) -> None:
            weight, row, name = place(start)
            quantize_into(weight, row, rows, form)
            if name:
                self.errors.append(row_errors(name, weight, row, rows, form))

        def put_part(start: int, rows: Tensor, inputs: slice) -> None:
            weight, row, name = place(start)
            of_all = quantize_searched(rows, form)
            pack_quantized_rows(weight, row, of_all._replace(codes=of_all.codes[:, inputs].contiguous()), form)
            if name:
                self.errors.append(row_errors(name, weight, row, rows[:, inputs], form))

        if isinstance(take, CutTake):
            take.check_groups(form.group_size)
        if isinstance(take, CutTake) and take.has_rows_scales and not form.group_size:
            take.whole_rows(shapes, put_part)
        else:
            take.rows(shapes, put)

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        return Dense.take(take, [part]) if self.scheme(part) is None else self.take(take, [part])

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        schemes = {self.scheme(part) for parts in experts for part in parts}
        if len(schemes) > 1:
            raise ValueError(
                f"quantization_skip must name all experts of a layer or none, and all their parts or none, given "
                f"{', '.join(self.skip)}, which names some like {experts[0][0].name}"
            )
        (scheme,) = schemes
        if scheme is None:
            return self.plain.take_experts(take, experts, top_k)
        out_features, in_features = sum(part.out_features for part in experts[0]), experts[0][0].in_features
        form = scheme.form
        weight = empty_quantized(form, out_features, in_features, take.device, len(experts))

        def place(start: int) -> tuple[QuantizedWeight, int, str]:
            expert, row = divmod(start, out_features)
            return weight.expert(expert), row, experts[expert][0].name

        self._round(
            take, {name: shape for parts in experts for name, shape in weight_shapes(parts).items()}, form, place
        )
        biases = take_biases(take, experts)
        return QuantizedExperts(weight, biases, scheme, len(experts), out_features, in_features, top_k)

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        return self.plain.take_heads(take, parts, num_heads, first)
