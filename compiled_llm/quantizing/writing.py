"""Writing a checkpoint of compressed-tensors: its tensors, shards, and the files beside them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import SCALE_DTYPES, QuantizedRows
from compiled_llm.quantizing.schemes import Scheme

_SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


def layer_tensors(rows: QuantizedRows, scheme: Scheme) -> dict[str, Tensor]:
    """What takes the place of a layer's ``weight``, by the last part of its name, as ``scheme.layout`` has it.

    "pack-quantized": 32-bit words of codes plus 2^(bits - 1), the first in the lowest bits, ``[N, K * bits / 32]``;
    zero points are packed so along the rows. "int-quantized" and "float-quantized": one byte for each.
    "mxfp4-pack-quantized": two codes in a byte, the first in the lower four bits, and the scales' exponents plus 127.
    """
    form = scheme.form
    scales = rows.scales.to(SCALE_DTYPES[form.scale_dtype])
    if scheme.layout == "mxfp4-pack-quantized":
        pairs = rows.codes.view(torch.uint8)
        exponents = (torch.frexp(rows.scales)[1] - 1 + 127).to(torch.uint8)
        return {"weight_packed": pairs[:, ::2] | pairs[:, 1::2] << 4, "weight_scale": exponents}
    if scheme.layout == "float-quantized":
        return {"weight": rows.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    if scheme.layout == "int-quantized":
        return {"weight": rows.codes, "weight_scale": scales}
    assert scheme.layout == "pack-quantized"
    tensors = {
        "weight_packed": _words(rows.codes, form.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(rows.codes.shape),
    }
    if rows.zeros is not None:
        tensors["weight_zero_point"] = _words(rows.zeros.to(torch.int8).T, form.bits).T.contiguous()
    return tensors


def _words(codes: Tensor, bits: int) -> Tensor:
    """``[n, K]`` int8 as ``[n, K * bits / 32]`` int32, rounded up."""
    each = 32 // bits
    codes = codes.to(torch.int32) + (1 << (bits - 1))
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    words = torch.zeros(codes.shape[:2], dtype=torch.int32)
    for place in range(each):
        words |= codes[:, :, place] << (bits * place)
    return words


class CheckpointWriter:
    """Collects tensors, and writes a shard whenever there is enough for one.

    Raises:
        ValueError: the directory is there already and holds something.
    """

    def __init__(self, source: Path, target: Path) -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"--output {target} must be a new or empty directory")
        target.mkdir(parents=True, exist_ok=True)
        self.source, self.target = source, target
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[dict[str, int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._waiting[name] = tensor.contiguous()
        if sum(t.nbytes for t in self._waiting.values()) >= _SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        save_file(self._waiting, self.target / f"shard-{len(self._shards)}.safetensors", metadata={"format": "pt"})
        self._shards.append({name: tensor.nbytes for name, tensor in self._waiting.items()})
        self._waiting = {}

    def finish(self, quantization: dict[str, Any]) -> int:
        """Write what is left, the index, ``config.json`` and the other files. Returns the bytes of all tensors."""
        if self._waiting:
            self._write()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for index, shard in enumerate(self._shards):
            name = f"model-{index + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            (self.target / f"shard-{index}.safetensors").rename(self.target / name)
            weight_map |= dict.fromkeys(shard, name)
        nbytes = sum(sum(shard.values()) for shard in self._shards)
        if count > 1:
            index_file = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
            self._write_json("model.safetensors.index.json", index_file)
        for path in sorted(self.source.iterdir()):
            name = path.name
            if path.is_file() and not name.endswith((*_NOT_COPIED, ".index.json")) and name != "config.json":
                shutil.copyfile(path, self.target / name)
        config = json.loads((self.source / "config.json").read_text(encoding="utf-8"))
        self._write_json("config.json", {**config, "quantization_config": quantization})
        return nbytes

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        (self.target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
