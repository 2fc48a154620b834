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
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from compiled_llm.compile_ahead import loaded_libraries
from compiled_llm.compile_cache import differences, machine_fields, write_whole
from compiled_llm.compiler import use_own_cache_directory
from compiled_llm.ops.native import cache_directory

_FORMAT = 2
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(graphs|inductor|kernels)(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
_MOST_BYTES = 2**32  # of all files, unpacked
_MOST_MANIFEST_BYTES = 2**24
_BROKEN = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError),  # RuntimeError: encrypted
    *(KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError),  # the manifest
)


def export_bundle(path: Path, entries: Iterable[Path]) -> int:
    """Write a bundle of ``entries`` (files below the cache directory) and of all libraries loaded from that directory.

    Call it where an engine runs on these entries, so that the libraries they need are loaded. Returns how many files it
    wrote.

    Raises:
        ValueError: torch keeps its libraries elsewhere (``TORCHINDUCTOR_CACHE_DIR``), so the bundle would lack them.
    """
    root = _root()
    files = {file.resolve() for file in [*entries, *loaded_libraries(root)]}
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
    """Put a bundle's files into the cache directory, once all of them are found to be whole. Returns their number.

    Raises:
        ValueError: it is no bundle, is damaged, is larger than 4 GiB unpacked, names a place outside of the cache, or
            is of another kind of machine; or ``TORCHINDUCTOR_CACHE_DIR`` is set, so torch would look elsewhere.
        OSError: the cache directory cannot be written to.
    """
    root = _root()
    try:
        with zipfile.ZipFile(path) as bundle:
            size = sum(info.file_size for info in bundle.infolist())  # zipfile reads no more than these say
            if size > _MOST_BYTES or bundle.getinfo(_MANIFEST).file_size > _MOST_MANIFEST_BYTES:
                raise ValueError(f"{path} takes {size} bytes unpacked, which is too much for a bundle: do not use it")
            manifest = json.loads(bundle.read(_MANIFEST))
            _check_manifest(path, manifest, bundle)
            contents = {name: bundle.read(name) for name in manifest["files"]}
    except _BROKEN as error:
        raise ValueError(f"{path} is no bundle of compile_model.py, or is damaged: {error!r}") from error
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != manifest["files"][name]:
            raise ValueError(f"{path} is damaged: {name} is not what the manifest says. Export it again")
    # Entries come last, so that none is found before the libraries that it loads.
    for name in sorted(contents, key=lambda name: (name.startswith("graphs/"), name)):
        target = root / name
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
        if not inside or name not in manifest["files"]:
            raise ValueError(f"{path} holds {name!r}, which is no file of a bundle: do not use it")


def _root() -> Path:
    """The cache directory, where torch keeps its libraries in a place below."""
    use_own_cache_directory()
    root = cache_directory().resolve()
    inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).resolve()
    if inductor != root / "inductor":
        raise ValueError(
            f"TORCHINDUCTOR_CACHE_DIR must be unset for a bundle, given {str(inductor)!r}: unset it, start again"
        )
    return root
