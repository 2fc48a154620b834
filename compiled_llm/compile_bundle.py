"""A bundle: what an engine's start left in the cache directory, in one file for another machine of the same kind.

A zip of compiled functions, of the libraries that they load, and of the C++ kernels, with a manifest of what kind of
machine it is for and of every file's SHA-256. **A bundle is a program.** The digests tell a damaged file, not a bad
author: take in bundles only of those whose programs you would run.
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from compiled_llm.compile_cache import differences, machine_fields, write_whole
from compiled_llm.ops.native import cache_directory

_FORMAT = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(graphs|inductor|kernels)(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
_MOST_BYTES = 2**32  # of one file, unpacked


def export_bundle(path: Path, entries: Iterable[Path]) -> int:
    """Write a bundle of ``entries`` (files below the cache directory) and of all libraries loaded from that directory.

    Call it where an engine runs on these entries, so that the libraries they need are loaded. Returns how many files it
    wrote.

    Raises:
        ValueError: torch keeps its libraries elsewhere (``TORCHINDUCTOR_CACHE_DIR``), so the bundle would lack them.
    """
    root = cache_directory().resolve()
    inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).resolve()
    if inductor != root / "inductor":
        raise ValueError(
            f"TORCHINDUCTOR_CACHE_DIR must be unset to export a bundle, given {str(inductor)!r}: unset it, start again"
        )
    files = {file.resolve() for file in [*entries, *_loaded_libraries(root)]}
    contents = {file.relative_to(root).as_posix(): file.read_bytes() for file in sorted(files)}
    manifest = {
        "format": _FORMAT,
        "machine": machine_fields(),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        for name, content in contents.items():
            bundle.writestr(name, content)
    return len(contents)


def import_bundle(path: Path) -> int:
    """Put a bundle's files into the cache directory, all or none. Returns their number.

    Raises:
        ValueError: it is no bundle, is damaged, names a place outside of the cache, or is of another kind of machine.
    """
    try:
        with zipfile.ZipFile(path) as bundle:
            manifest = json.loads(bundle.read(_MANIFEST))
            _check_manifest(path, manifest, bundle)
            contents = {name: bundle.read(name) for name in manifest["files"]}
    except (OSError, KeyError, TypeError, zipfile.BadZipFile, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no bundle of compile_model.py, or is damaged: {error!r}") from error
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != manifest["files"][name]:
            raise ValueError(f"{path} is damaged: {name} is not what the manifest says. Export it again")
    # A function's .json makes it an entry, so these come last.
    for name in sorted(contents, key=lambda name: (name.endswith(".json"), name)):
        target = cache_directory() / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(target, contents[name])
        if target.suffix == ".so":
            target.chmod(0o755)
    return len(contents)


def _check_manifest(path: Path, manifest: Any, bundle: zipfile.ZipFile) -> None:
    if manifest["format"] != _FORMAT:
        raise ValueError(f"{path} must be of format {_FORMAT}, given {manifest['format']!r}: export it again")
    other = differences(manifest["machine"], machine_fields())
    if other:
        raise ValueError(f"{path} is for another kind of machine, so it is left alone: {'; '.join(other)}")
    for info in bundle.infolist():
        name = info.filename
        if name == _MANIFEST:
            continue
        inside = _NAME.fullmatch(name) and ".." not in PurePosixPath(name).parts
        if not inside or name not in manifest["files"] or info.file_size > _MOST_BYTES:
            raise ValueError(f"{path} holds {name!r}, which is no file of a bundle: do not use it")


def _loaded_libraries(root: Path) -> set[Path]:
    """Shared libraries below ``root`` that this process has loaded, as Linux lists them."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps if line.endswith(".so")}
    return {file for file in mapped if root in file.parents and file.exists()}
