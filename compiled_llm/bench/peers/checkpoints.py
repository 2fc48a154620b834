"""The checkpoints of ``bench peers``: random weights of a shape, and the same model as each peer reads it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.ops.linear.quantized_weight import WeightFormat, quantize

GGUF = Path(__file__).with_name("gguf_model.py")


class ConversionFailed(Exception):
    """A peer's own program did not convert the checkpoint."""


def write_checkpoint(shape: str, directory: Path) -> None:
    """Random bfloat16 weights of a shape (std 0.02, as its family starts training), unless they exist already."""

    def write(unfinished: Path) -> None:
        config = transformers.AutoConfig.for_model(**SHAPES[shape], bos_token_id=None, eos_token_id=None)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(unfinished)

    _once(directory, write)


def write_openvino(python: str, checkpoint: Path, directory: Path, arguments: list[str]) -> None:
    """Converts a checkpoint with optimum-intel and NNCF, unless that was done already. ``arguments``: its weights'."""
    tool = Path(python).absolute().with_name("optimum-cli")
    model = ["--model", str(checkpoint), "--task", "text-generation-with-past"]
    command = [str(tool), "export", "openvino", *model, *arguments]
    _once(directory, lambda unfinished: _run("openvino", [*command, str(unfinished)]))


def write_gguf(python: str, checkpoint: Path, file: Path, kind: str, head: str) -> None:
    """Converts a checkpoint by ``gguf_model.py`` in llama.cpp's environment, unless that was done already."""
    command = [python, str(GGUF), str(checkpoint)]
    _once(file, lambda unfinished: _run("llama.cpp", [*command, str(unfinished), kind, head]))


def write_compressed(checkpoint: Path, directory: Path, bits: int, group_size: int) -> None:
    """Writes a checkpoint as compressed-tensors has it, for vLLM, rounded to nearest, unless that was done already.

    8 bits: a scale for each output, activations to be rounded to int8, a token at a time. 4 bits: a scale for each
    ``group_size`` inputs, eight codes in an int32, the first in its lowest bits. The head stays as it is.
    """

    def write(unfinished: Path) -> None:
        unfinished.mkdir()
        tensors: dict[str, Tensor] = {}
        for file in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 (no mapping)
                    tensors |= _compressed(name, stored.get_tensor(name), bits, group_size)
        save_file(tensors, unfinished / "model.safetensors", {"format": "pt"})
        config = json.loads((checkpoint / "config.json").read_text())
        config["quantization_config"] = _compressed_config(bits, group_size)
        (unfinished / "config.json").write_text(json.dumps(config))

    _once(directory, write)


def _compressed(name: str, tensor: Tensor, bits: int, group_size: int) -> dict[str, Tensor]:
    module, _, kind = name.rpartition(".")
    if not module.endswith("_proj") or kind != "weight":
        return {name: tensor}
    if bits == 8:
        rows = quantize(tensor, WeightFormat("int8", 0, scale_dtype="bfloat16"))
        return {name: rows.codes, f"{module}.weight_scale": rows.scales.bfloat16()}
    rows = quantize(tensor, WeightFormat("int4", group_size, scale_dtype="bfloat16"))
    codes = (rows.codes.int() + 8).view(len(tensor), -1, 8)
    packed = sum((codes[..., place] << 4 * place for place in range(8)), torch.zeros_like(codes[..., 0]))
    shape = torch.tensor(tensor.shape)
    return {
        f"{module}.weight_packed": packed.contiguous(),
        f"{module}.weight_scale": rows.scales.bfloat16(),
        f"{module}.weight_shape": shape,
    }


def _compressed_config(bits: int, group_size: int) -> dict[str, object]:
    whole = {"num_bits": bits, "type": "int", "symmetric": True}
    if bits == 8:
        weights = whole | {"strategy": "channel", "dynamic": False}
        activations = whole | {"strategy": "token", "dynamic": True}
    else:
        weights, activations = whole | {"strategy": "group", "group_size": group_size, "dynamic": False}, None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
    }


def _once(path: Path, write: Callable[[Path], None]) -> None:
    """``path`` is there in full or not at all."""
    if path.exists():
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    write(unfinished)
    unfinished.rename(path)


def _run(peer: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-15:])
        raise ConversionFailed(f"{peer}: its export ended with status {done.returncode}; its last lines:\n{last}")
