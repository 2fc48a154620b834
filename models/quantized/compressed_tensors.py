"""``quant_method`` "compressed-tensors": groups of modules, each with its own numbers and format."""

from collections.abc import Mapping
from typing import Any

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.codes import EightBits, Fp4, Words
from compiled_llm.models.quantized.patterns import matches
from compiled_llm.models.quantized.scheme import Scheme, kept_group
from compiled_llm.ops.linear.quantized_weight import WeightFormat

_FORMATS = [
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
]  # fmt: skip
_MIXED = "mixed-precision"  # each group says its own
_EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "wpe", "embed_tokens_per_layer")
_CLASSES = {"Linear", "Embedding"}


class Groups:
    """Which modules have which scheme: by name, then by pattern, then by class; those of ``ignore`` have none."""

    def __init__(self, by_target: Mapping[str, Scheme], ignore: tuple[str, ...]) -> None:
        self._by_target = dict(sorted(by_target.items(), key=lambda item: ("re:" in item[0], item[0])))
        self._ignore = ignore

    def scheme(self, module: str) -> Scheme | None:
        kind = "Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear"
        if any(_is_meant(module, target) or target == kind for target in self._ignore):
            return None
        named = next((scheme for target, scheme in self._by_target.items() if _is_meant(module, target)), None)
        return named or self._by_target.get(kind)


def _is_meant(module: str, target: str) -> bool:
    names = fields.names_of(module)
    return any(matches(target[3:], name) for name in names) if target.startswith("re:") else target in names


def read_compressed_tensors(config: Mapping[str, Any]) -> Groups:
    """The groups of a ``quantization_config``.

    A scheme of the KV cache is left: the engine argument ``kv_cache_dtype`` says how it is kept.
    """
    allowed = {"quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status",
               "global_compression_ratio", "version", "sparsity_config", "transform_config", "dequantize",
               "use_optimized_inference", "run_compressed", "packed_modules_mapping"}  # fmt: skip
    fields.known(config, allowed, "quant_method 'compressed-tensors'")
    sparsity = fields.table(config.get("sparsity_config") or {}, "sparsity_config")
    if sparsity and sparsity.get("format") != "dense":
        raise ValueError(
            f"config.json: sparsity_config of quantization_config must be empty or of format 'dense', given "
            f"{sparsity!r:.200}. Load a checkpoint without sparsity"
        )
    if config.get("transform_config"):
        raise ValueError(
            "config.json: transform_config of quantization_config must be empty, since inputs are not rotated here, "
            f"given {config['transform_config']!r:.200}. Load a checkpoint without transforms"
        )
    fields.choice(config, "quantization_status", ["compressed", "frozen", None])
    groups = fields.table(config.get("config_groups"), "config_groups")
    of_all = fields.choice(config, "format", [*_FORMATS, _MIXED], None)
    by_target: dict[str, Scheme] = {}
    for name, given in groups.items():
        group = fields.table(given, f"config_groups[{name!r:.50}]")
        fields.known(
            group, {"targets", "weights", "input_activations", "output_activations", "format"}, "config_groups"
        )
        own = "format" if group.get("format") else None
        format_ = fields.choice(group if own else {"format": of_all}, "format", _FORMATS)
        scheme = _scheme(group, format_)
        for target in fields.names(group, "targets"):
            if target[0].isupper() and target not in _CLASSES:
                raise ValueError(
                    f"config.json: targets of quantization_config must be Linear, Embedding, names of modules or "
                    f"patterns that begin with 're:', given {target!r:.200}. Name the modules instead"
                )
            if target.startswith("re:"):
                matches(target[3:], "")  # which refuses what it does not read
            by_target.setdefault(target, scheme)
    ignore = fields.names(config, "ignore")
    for pattern in ignore:
        if pattern.startswith("re:"):
            matches(pattern[3:], "")
    return Groups(by_target, ignore)


_NUMBERS = {"num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder",
            "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}  # fmt: skip


def _scheme(group: Mapping[str, Any], format_: str) -> Scheme:
    weights = fields.table(group.get("weights"), "weights")
    fields.known(weights, _NUMBERS, "weights")
    bits = fields.choice(weights, "num_bits", [4, 8], 8)
    kind = fields.choice(weights, "type", ["int", "float"], "int")
    symmetric = fields.choice(weights, "symmetric", [True, False] if kind == "int" else [True], True)
    fields.choice(weights, "dynamic", [False], False)
    if format_ in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return _fp4(weights, format_)
    element = {("int", 8): "int8", ("int", 4): "int4", ("float", 8): "fp8"}.get((kind, bits))
    if element is None or (format_ == "pack-quantized" and kind == "float"):
        raise ValueError(
            f"config.json: weights of quantization_config must be int of 4 or 8 bits, or float of 8 where format is "
            f"not 'pack-quantized', given {kind!r} of {bits} with format {format_!r}"
        )
    block, size = _block(weights)
    activations, static = _activations(group, element)
    form = WeightFormat(element, size, zeros=not symmetric)
    ordering = weights.get("actorder")
    if ordering not in (None, False, "group", "weight", "static", "dynamic"):
        raise ValueError(
            f"config.json: actorder of quantization_config must be 'group' or 'weight', given {ordering!r:.100}"
        )
    by_activations = ordering in ("group", "dynamic")
    if format_ == "pack-quantized":
        return Words(form, activations, static, block, ordered=by_activations)
    if by_activations:
        raise ValueError(
            f"config.json: actorder of quantization_config must be 'weight' or null where format is {format_!r}, given "
            f"{ordering!r}"
        )
    return EightBits(form, activations, static, block)


def _block(weights: Mapping[str, Any]) -> tuple[tuple[int, int], int]:
    """Outputs and inputs that share a scale (0: all), and the kernels' group size."""
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    where = {"strategy": weights.get("strategy") or inferred}
    strategy = fields.choice(where, "strategy", ["tensor", "channel", "group", "block"])
    if strategy == "tensor":
        return (0, 0), 0
    if strategy == "channel":
        return (1, 0), 0
    if strategy == "group":
        size = fields.whole(weights, "group_size")
        return (1, max(size, 0)), kept_group(size, "group_size of quantization_config")[0]
    return read_block(weights.get("block_structure"), "block_structure")


def read_block(given: Any, name: str) -> tuple[tuple[int, int], int]:
    """``[outputs, inputs]`` that share a scale, and the kernels' group size."""
    if not isinstance(given, list) or len(given) != 2 or any(type(x) is not int or not 0 < x < 1 << 20 for x in given):
        raise ValueError(
            f"config.json: {name} of quantization_config must be two whole numbers above 0, given {given!r:.100}"
        )
    return (given[0], given[1]), kept_group(given[1], f"{name}[1] of quantization_config")[0]


def _activations(group: Mapping[str, Any], element: str) -> tuple[str, bool]:
    """How inputs are computed with. Those in fp8, and with zero points, stay in the model's dtype: nothing is lost."""
    given = group.get("input_activations")
    if given is None or element == "fp8":
        return "model", False
    given = fields.table(given, "input_activations")
    fields.known(given, _NUMBERS, "input_activations")
    fields.choice(given, "type", ["int"], "int")
    fields.choice(given, "num_bits", [8], 8)
    if not fields.choice(given, "symmetric", [True, False], True):
        return "model", False
    dynamic = fields.choice(given, "dynamic", [True, False], False)
    strategies = ["token", "tensor", None] if dynamic else ["tensor", None]
    fields.choice(given, "strategy", strategies)
    return "int8", not dynamic


def _fp4(weights: Mapping[str, Any], format_: str) -> Fp4:
    nvfp4 = format_ == "nvfp4-pack-quantized"
    fields.choice(weights, "num_bits", [4])
    fields.choice(weights, "type", ["float"])
    size = fields.choice(weights, "group_size", [16 if nvfp4 else 32])
    if nvfp4:
        return Fp4(WeightFormat("fp4", size), block=(1, size), whole_scale="weight_global_scale", divides=True)
    return Fp4(WeightFormat("fp4", size, scale_dtype="bfloat16"), block=(1, size))  # powers of two are exact in it
