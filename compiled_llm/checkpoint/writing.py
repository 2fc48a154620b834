"""CheckpointWriter: a directory as the hub has them: shards of tensors, their index, and the files beside them."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

_SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")


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

    def finish(self, quantization: dict[str, Any] | None = None) -> int:
        """Write what is left, the index, ``config.json`` and the other files. Returns the bytes of all tensors.

        ``quantization``: what ``config.json`` is to say of it; None: it stays as it is.
        """
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
        quantized = {} if quantization is None else {"quantization_config": quantization}
        self._write_json("config.json", config | quantized)
        return nbytes

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        (self.target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
