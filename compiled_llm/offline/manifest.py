"""The manifest of a run: what decides its results, in a file beside the output. A resumed run must have an equal one.

What changes no token is in it for information: the names of files, the versions of packages, and sizes of buckets,
chunks and pools, since a request's tokens do not depend on the requests beside it.
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

from compiled_llm.adapters.peft import TENSORS_FILE, stamp
from compiled_llm.adapters.peft_config import CONFIG_FILE
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRAModule
from compiled_llm.checkpoint.digests import add_files, model_digest
from compiled_llm.checkpoint.model_files import checkpoint_directory, model_directory
from compiled_llm.models.files import MAX_JSON_BYTES, open_file, read_json
from compiled_llm.offline.files import naming, replacing, sync_directory
from compiled_llm.offline.reading import STDIN, InputFile
from compiled_llm.text.tokenizer_files import files_of

FORMAT = 1
# Engine arguments that decide which tokens a row has. The model and the tokenizer are known by their digests.
DECIDING = (
    *("dtype", "device", "load_format", "model_impl", "max_model_len", "kv_cache_dtype", "kv_cache_skip_layers"),
    *("quantization", "quantization_group_size", "quantization_skip", "quantization_head", "quantization_embedding"),
    *("quantization_activations", "tensor_parallel_size", "tensor_parallel_exact", "enable_expert_parallel"),
    *("sliding_window", "attention_sink_tokens", "logits_transforms", "exact", "seed", "split_special_tokens"),
)
_KEYS = {"format", "inputs", "engine", "sampling"}  # of a manifest, of whatever format
_PACKAGES = ("compiled-llm", "torch", "transformers")
_NAMED_INPUTS = 3  # of the inputs that differ


def make_manifest(
    files: Sequence[InputFile],
    config: EngineConfig,
    sampling: Mapping[str, Any],
    *,
    device: str,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """The manifest of a run, as values of JSON. It reads the inputs once.

    Args:
        sampling: sampling parameters of the run.
        device: the kind that ``config.device`` comes to: "cpu" or "cuda".
        digests: as ``digests_of`` gives them.

    Raises:
        OSError: a file cannot be read.
    """
    arguments = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    arguments["device"] = device
    deciding = {name: arguments.pop(name) for name in DECIDING}
    manifest = {
        "format": FORMAT,
        "inputs": [_input(file) for file in files],
        **{f"{kind}_sha256": digest for kind, digest in digests.items()},
        "engine": deciding,
        "sampling": dict(sampling),
        "information": {
            "inputs": [file.name for file in files],
            "engine": {name: value for name, value in arguments.items() if value is not None},
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
            "machine": platform.machine(),
        },
    }
    return json.loads(json.dumps(manifest, default=repr))


def check_manifest(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Compare with the manifest at ``path`` what decides the results.

    Returns:
        What may change the last bits of a number: versions that are others than they were, as text.

    Raises:
        ValueError: the run that wrote it gives other results, or it cannot be read.
    """
    if not os.path.lexists(path):
        raise ValueError(
            f"--resume needs the manifest {path} that stands beside the output of a run, and it is not there. Without "
            "it nothing tells whether these rows belong to this input: give another --output"
        )
    try:
        earlier = read_json(path, MAX_JSON_BYTES)
        if earlier.get("format") != FORMAT:
            raise ValueError(f"{path}: must have the format {FORMAT}, found {earlier.get('format')!r:.100}")
    except ValueError as error:
        raise ValueError(f"--resume: the manifest cannot be read: {error}; give another --output") from error
    differences = list(_differences(earlier, manifest))
    if differences:
        raise ValueError(
            f"--resume: the output was made with other settings: {'; '.join(differences)}. Give those of the first "
            f"run, which {path} has, or another --output"
        )
    return _other_versions(earlier, manifest)


def check_replaceable(path: Path) -> None:
    """That nothing is lost when a manifest is written there: there is nothing, or the manifest of an earlier output.

    Raises:
        ValueError: there is a file of somebody else.
        OSError: it cannot be read.
    """
    if not os.path.lexists(path):
        return
    with naming(f"the manifest {path}"):
        is_small = path.is_file() and path.stat().st_size <= MAX_JSON_BYTES
        content = path.read_bytes() if is_small else b""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or _KEYS - found.keys():
        raise ValueError(
            f"the manifest of --output must be a new file, or that of an earlier run, and {path} is none: move it "
            "away, or give another --output"
        )


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Whole or not at all, also if the machine goes down.

    Raises:
        ValueError: what is there is no manifest.
        OSError: it cannot be written.
    """
    check_replaceable(path)
    with naming(f"the manifest {path}"):
        with replacing(path, "new", 0o666) as descriptor, open(descriptor, "w", closefd=False) as file:
            json.dump(manifest, file, indent=1)
            file.write("\n")
        os.close(descriptor)
        sync_directory(path.parent)


# -- What differs


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A text for each thing that must be equal and is not."""
    yield from _input_differences(_list(earlier.get("inputs")), now["inputs"])
    for digest in dict.fromkeys(name for one in (now, earlier) for name in one if name.endswith("_sha256")):
        kind, old, new = digest.removesuffix("_sha256"), earlier.get(digest), now.get(digest)
        if old != new:
            name = _dict(_dict(earlier.get("information")).get("engine")).get(kind)
            was = "" if name is None else f", then {name!r:.200}"
            yield f"the {kind} is another one{was} (sha256 {_brief(new)} and was {_brief(old)})"
    for section in ("engine", "sampling"):
        old, new = _dict(earlier.get(section)), now[section]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                yield f"--{name.replace('_', '-')} is {new.get(name)!r:.100} and was {old.get(name)!r:.100}"


def _input_differences(old: Sequence[Any], new: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if len(old) != len(new):
        yield f"--input has {len(new)} files and had {len(old)}"
        return
    changed = [
        _changed_input(one, _dict(other))
        for one, other in zip(new, old, strict=True)
        if any(one[name] != _dict(other).get(name) for name in ("kind", "compression", "sha256"))
    ]
    yield from changed[:_NAMED_INPUTS]
    if len(changed) > _NAMED_INPUTS:
        yield f"{len(changed) - _NAMED_INPUTS} more inputs have other contents"


def _changed_input(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    name, old_name = now["name"], earlier.get("name")
    how = "has another content than it had" if name == old_name else f"has not the content of {old_name!r:.200}"
    return f"--input {name!r:.200} {how} (sha256 {_brief(now['sha256'])} and was {_brief(earlier.get('sha256'))})"


def _other_versions(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    old, new = _dict(_dict(earlier.get("information")).get("versions")), now["information"]["versions"]
    return [f"{name} is {new[name]} and was {old.get(name)}" for name in new if new[name] != old.get(name)]


def _brief(digest: Any) -> str:
    return str(digest)[:12]


def _dict(value: Any) -> Mapping[str, Any]:
    """A manifest that somebody edited may hold anything: what is no object is one without keys."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


# -- What is compared


def _input(file: InputFile) -> dict[str, Any]:
    values: dict[str, Any] = {"name": Path(file.name).name, "kind": file.kind, "compression": file.compression}
    if file.name == STDIN:
        return {**values, "bytes": None, "sha256": None}
    with naming(f"--input {file.name}"), open(file.name, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {**values, "bytes": file.num_bytes, "sha256": digest}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- Digests


def digests_of(config: EngineConfig, adapters: Mapping[str, LoRAModule]) -> dict[str, str]:
    """By "model", "tokenizer" and "adapter NAME": SHA-256 of the files that a config and ``adapters`` name.

    Raises:
        ValueError, OSError: as ``model_digest`` and ``tokenizer_digest`` raise them.
    """
    directory = checkpoint_directory(config)
    return {
        "model": model_digest(directory, config.load_format),
        "tokenizer": tokenizer_digest(config, directory),
        **{f"adapter {name}": _adapter_digest(Path(one.lora_request.lora_path)) for name, one in adapters.items()},
    }


def tokenizer_digest(config: EngineConfig, directory: Path) -> str:
    """SHA-256, in hex, of all files of the tokenizer.

    Args:
        directory: of the model, which has them unless ``config`` names another.

    Raises:
        ValueError: there is no such directory, or a file is no regular one or too large.
        OSError: one cannot be read.
    """
    if config.tokenizer is not None:
        directory = model_directory(config.tokenizer, config.tokenizer_revision, "tokenizer")
    digest = hashlib.sha256()
    add_files(digest, sorted(path for path in files_of(directory) if path.is_file()))
    return digest.hexdigest()


def _adapter_digest(directory: Path) -> str:
    stamp(directory)  # which says what a directory of an adapter is
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, TENSORS_FILE):
        with open_file(directory / name) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())  # type: ignore[arg-type]
    return digest.hexdigest()
