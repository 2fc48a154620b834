"""What ``bench peers`` compares with what: the precision of each engine's weights, activations, head and KV cache."""

from typing import Any, NamedTuple

KV_CACHE = {"engine": "bfloat16", "vllm": "bfloat16", "openvino": "float16", "llama.cpp": "float16"}


class Precision(NamedTuple):
    """How each engine is set for one like precision.

    Attributes:
        engines: name of a row -> this engine's arguments; the first is what is compared with the peers.
        bits: of the weights.
        group_size: inputs that share a scale, 0: all; llama.cpp's are always 32.
        openvino: what optimum-cli is given.
        gguf: llama.cpp's types of the layers and of the head.
        words: name -> (weights, activations, head); activations are what the matrix products read.
    """

    engines: dict[str, dict[str, Any]]
    bits: int
    group_size: int
    openvino: list[str]
    gguf: tuple[str, str]
    words: dict[str, tuple[str, str, str]]

    def facts(self, name: str) -> dict[str, str]:
        """The words of an engine, for the results."""
        weights, activations, head = self.words.get(name, ("bfloat16",) * 3)
        cache = next((of for start, of in KV_CACHE.items() if name.startswith(start)), "bfloat16")
        return {"weights": weights, "activations": activations, "head": head, "kv_cache": cache}


def precision(name: str, group_size: int) -> Precision:
    """``name``: "bf16", "int8", "int4" or "file", a GGUF file as it is; ``group_size``: of int4, but for llama.cpp."""
    if name == "file":
        words = {"engine": ("the file's", "int8 per group", "the file's")}
        words["llama.cpp"] = ("the file's", "Q8 (int8 per 32 or 256)", "the file's")
        return Precision({"engine": {}}, 16, 0, [], ("", ""), words)
    if name == "bf16":
        words = dict.fromkeys(("engine", "vllm", "llama.cpp"), ("bfloat16",) * 3)
        words["openvino"] = ("float16", "bfloat16", "float16")
        words["openvino-stateful"] = words["openvino"]
        return Precision({"engine": {}}, 16, 0, ["--weight-format", "fp16"], ("BF16", "BF16"), words)
    if name == "int8":
        whole = "int8, a scale per output"
        words = {
            "engine": (whole, "int8 per token", whole),
            "engine-weights": (whole, "bfloat16", whole),
            "vllm": (whole, "int8 per token", "bfloat16"),
            "openvino": (whole, "chosen by its CPU plugin", whole),
            "llama.cpp": ("Q8_0 (8.5 bits)", "Q8_0 (int8 per 32)", "Q8_0"),
        }
        engines = {"engine": {"quantization": "int8_w8a8"}, "engine-weights": {"quantization": "int8"}}
        arguments = ["--weight-format", "int8", "--sym"]
        bits, gguf, group_size = 8, ("Q8_0", "Q8_0"), 0
    else:
        group, head = f"int4 in groups of {group_size}", "int8, a scale per output"
        words = {
            "engine": (group, "int8 per token", head),
            "engine-weights": (group, "bfloat16", head),
            "vllm": (group, "int8 with AMX, else bfloat16", "bfloat16"),
            "openvino": (group, "chosen by its CPU plugin", head),
            "llama.cpp": ("Q4_0 (4.5 bits)", "Q8_0 (int8 per 32)", "Q8_0"),
        }
        of: dict[str, Any] = {"quantization_group_size": group_size}
        engines = {"engine": {"quantization": "int4_w4a8"} | of, "engine-weights": {"quantization": "int4"} | of}
        arguments = ["--weight-format", "int4", "--sym", "--group-size", str(group_size), "--ratio", "1.0"]
        arguments += ["--backup-precision", "int8_sym"]
        bits, gguf = 4, ("Q4_0", "Q8_0")
    words["openvino-stateful"] = words["openvino"]
    return Precision(engines, bits, group_size, arguments, gguf, words)
