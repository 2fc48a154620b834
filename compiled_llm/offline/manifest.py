"""The manifest of a run: what decides its results, in a file beside the output. A resumed run must have the same.

What changes no token is in it for information: sizes of buckets, chunks and pools, since a request has the same tokens
in any company, and the versions of packages.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_llm.config import EngineConfig
from compiled_llm.offline.output_file import sync_directory
from compiled_llm.offline.process import naming
from compiled_llm.offline.reading import STDIN, InputFile
from compiled_llm.text.tokenizer_files import files_of
from compiled_llm.worker.device import resolve_device
from compiled_llm.worker.hub import model_directory

FORMAT = 1
_SECTIONS = ("inputs", "model", "tokenizer", "engine", "sampling")  # that must be equal
# Engine arguments that decide which tokens a row has.
_DECIDING = (
    *("dtype", "device", "load_format", "model_impl", "max_model_len", "kv_cache_dtype", "kv_cache_skip_layers"),
    *("quantization", "quantization_group_size", "quantization_skip", "quantization_head", "quantization_embedding"),
    *("sliding_window", "attention_sink_tokens", "logits_transforms", "exact", "seed"),
)
_SAMPLES, _SAMPLE_BYTES = 64, 2**16


def manifest_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.manifest.json")


def make_manifest(
    files: Sequence[InputFile], config: EngineConfig, directory: Path, sampling: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of a run, as values of JSON. It reads the inputs once, and a part of the model.

    Args:
        directory: of the model.
        sampling: sampling parameters of the run.

    Raises:
        OSError: a file cannot be read.
    """
    arguments = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    arguments["device"] = resolve_device(config.device).type
    tokenizer = directory
    if config.tokenizer is not None:
        tokenizer = model_directory(config.tokenizer, config.tokenizer_revision, "tokenizer")
    manifest = {
        "format": FORMAT,
        "inputs": [_input(file) for file in files],
        "model": {"name": config.model, "revision": config.revision, "sha256": _model_digest(directory)},
        "tokenizer": {"name": config.tokenizer, "sha256": _digest(sorted(files_of(tokenizer)))},
        "engine": {name: arguments.pop(name) for name in _DECIDING},
        "sampling": dict(sampling),
        "information": {
            "engine": {name: value for name, value in arguments.items() if value is not None},
            "packages": {name: _version(name) for name in ("compiled-llm", "torch", "transformers")},
            "python": platform.python_version(),
        },
    }
    return json.loads(json.dumps(manifest, default=repr))


def check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """``ValueError`` unless the run that wrote the manifest at ``path`` gives the same results as that of this one."""
    try:
        earlier = json.loads(path.read_text())
        if not isinstance(earlier, dict) or earlier.get("format") != FORMAT:
            raise ValueError(f"it is no manifest of format {FORMAT}")
    except FileNotFoundError:
        raise ValueError(
            f"--resume needs the manifest {path} that stands beside the output of a run, and it is not there: without "
            "it nothing tells whether these rows belong to this input"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--resume: the manifest {path} cannot be read: {error}") from error
    differences = list(_differences(earlier, manifest))
    if differences:
        raise ValueError(
            f"--resume: the output was made with other settings: {'; '.join(differences)}. Give those of the first "
            f"run, which {path} has, or another --output"
        )


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Whole or not at all, also if the machine goes down."""
    new = path.with_name(f"{path.name}.new")
    with naming(f"the manifest {path}"):
        try:
            with open(new, "w") as file:
                json.dump(manifest, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """``NAME is X and was Y``, for all that must be equal."""
    for section in _SECTIONS:
        old, new = earlier.get(section), now[section]
        if old == new:
            continue
        if not isinstance(old, dict) or not isinstance(new, dict):
            yield f"{section}: {_brief(new)} and was {_brief(old)}"
            continue
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                yield f"{section} {name} is {_brief(new.get(name))} and was {_brief(old.get(name))}"


def _brief(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return ", ".join(f"{item.get('name')} ({str(item.get('sha256'))[:12]})" for item in value)
    return f"{value!r:.100}"


def _input(file: InputFile) -> dict[str, Any]:
    if file.name == STDIN:
        return {"name": STDIN, "bytes": None, "sha256": None}
    with naming(f"--input {file.name}"), open(file.name, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"name": Path(file.name).name, "bytes": file.num_bytes, "sha256": digest}


def _model_digest(directory: Path) -> str:
    """Of the config, and of each file of weights its size, its header and 64 samples of its data.

    So two checkpoints of the same shapes are told apart unless they differ in a few values alone. To read all data
    would take as long as to load it.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for place in range(_SAMPLES):
                file.seek(place * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    files = [path for name in ("config.json", "generation_config.json") if (path := directory / name).is_file()]
    return _digest(files, digest)


def _digest(paths: Sequence[Path], digest: Any = None) -> str:
    """Of names and contents."""
    digest = digest or hashlib.sha256()
    for path in paths:
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
