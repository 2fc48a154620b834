"""A bundle: what a start of an engine uses from the cache directory, in one file for other machines of the same kind.

It is a zip of compiled functions, of the libraries that they load and of the C++ kernels, with a manifest: the kind of
machine, and the SHA-256 of each file. **A bundle is a program.** The digests detect damage, not a malicious author:
import bundles only from people whose programs you would run.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from compiled_llm.compiling.keys import differences, machine_fields, reason
from compiled_llm.compiling.libraries import loaded_libraries, use_own_cache_directory
from compiled_llm.ops.native import cache_directory
from compiled_llm.ops.trusted_paths import make_directory

_FORMAT = 3
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(graphs|inductor|kernels)(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+")
_MAX_BYTES = 2**32  # of all files, unpacked, on disk
_MAX_MANIFEST_BYTES = 2**22  # of some 25,000 files
_MAX_INDEX_BYTES = 2**22  # of the zip's own list of its files, which zipfile reads at once
_CHUNK = 2**20  # of a file, in memory
# The end of a zip file: the marker of a zip64 list, which no bundle has, that of the end, and the list's size.
_TAIL = struct.Struct("<4s16x4s8xL6x")
# What zipfile and json raise for damaged files. RuntimeError: an encrypted one.
_BROKEN = (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, KeyError, ValueError)


def export_bundle(path: Path, entries: Iterable[Path]) -> int:
    """Write a bundle of ``entries`` (files below the cache directory) and of all libraries loaded from that directory.

    An engine of this process must run on these entries, so that their libraries are loaded. Returns the number of
    files written.

    Raises:
        ValueError: torch keeps its libraries elsewhere (``TORCHINDUCTOR_CACHE_DIR``), so the bundle would lack them.
    """
    root = _root()
    files = {file.resolve() for file in [*entries, *loaded_libraries(root)]}
    names = {file.relative_to(root).as_posix(): file for file in sorted(files)}
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in names.items()}
    manifest = {"format": _FORMAT, "machine": machine_fields(), "files": digests}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        for name, file in names.items():
            bundle.write(file, name)
    with _reading(path):
        _check_index(path)
    return len(names)


def import_bundle(path: Path) -> int:
    """Put a bundle's files into the cache directory, after all of them were checked. Returns their number.

    They are unpacked one by one onto the cache directory's disk; the memory that this takes is the same for any bundle.

    Raises:
        ValueError: it is no bundle, is damaged, is larger than 4 GiB unpacked or than the free space on the disk, names
            a place outside of the cache, or is of another kind of machine; or ``TORCHINDUCTOR_CACHE_DIR`` is set,
            so that torch would look elsewhere.
        OSError: the cache directory cannot be written to.
    """
    root = _root()
    if not path.is_file():
        raise ValueError(f"{path} must be a file, a bundle of compiled-llm compile")
    with _reading(path):
        _check_index(path)
        bundle = zipfile.ZipFile(path)
    with bundle, tempfile.TemporaryDirectory(dir=root, prefix="import-") as directory:
        names = _unpack(path, bundle, root, Path(directory))
        # Entries last, so that none is found before the libraries that it loads.
        for name in sorted(names, key=lambda name: (name.startswith("graphs/"), name)):
            make_directory((root / name).parent)
            os.replace(Path(directory, name), root / name)
    return len(names)


def _unpack(path: Path, bundle: zipfile.ZipFile, root: Path, directory: Path) -> list[str]:
    """Check everything, and write the files to ``directory``. Returns their names."""
    with _reading(path):
        size = sum(info.file_size for info in bundle.infolist())  # zipfile reads no more than these say
        size_of_manifest = bundle.getinfo(_MANIFEST).file_size
    free = shutil.disk_usage(root).free
    if size > _MAX_BYTES or size_of_manifest > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path} takes {size} bytes unpacked, which is too much for a bundle: do not use it")
    if size > free:
        raise ValueError(f"{path} takes {size} bytes unpacked, and {free} are free in the cache directory: make room")
    with _reading(path):
        manifest = json.loads(bundle.read(_MANIFEST))
    _check_manifest(path, manifest, bundle)
    for name, sha256 in manifest["files"].items():
        if _unpack_file(path, bundle, name, directory / name) != sha256:
            raise ValueError(f"{path} is damaged: {name} is not what the manifest says. Export it again")
    return list(manifest["files"])


def _unpack_file(path: Path, bundle: zipfile.ZipFile, name: str, target: Path) -> str:
    """Write one file of a bundle. Returns its SHA-256."""
    make_directory(target.parent)
    hashed = hashlib.sha256()
    with _reading(path):
        source = bundle.open(name)
    with source, target.open("xb") as file:
        while True:
            with _reading(path):
                chunk = source.read(_CHUNK)
            if not chunk:
                break
            hashed.update(chunk)
            file.write(chunk)
    target.chmod(0o755 if target.suffix == ".so" else 0o600)
    return hashed.hexdigest()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of zipfile and json become a ``ValueError`` that names the bundle."""
    try:
        yield
    except _BROKEN as error:
        raise ValueError(f"{path} is no bundle of compiled-llm compile, or is damaged: {error!r}") from error


def _check_index(path: Path) -> None:
    """Refuse a list of files so long that reading it would take much memory."""
    with path.open("rb") as file:
        file.seek(-min(_TAIL.size, path.stat().st_size), os.SEEK_END)
        tail = file.read()
    zip64, end, size = _TAIL.unpack(tail.rjust(_TAIL.size, b"\0"))
    if zip64 == b"PK\6\7" or end != b"PK\5\6" or size > _MAX_INDEX_BYTES:
        raise zipfile.BadZipFile("it is no zip file, or has too many files")


def _check_manifest(path: Path, manifest: Any, bundle: zipfile.ZipFile) -> None:
    parts = [manifest.get(name) for name in ("machine", "files")] if isinstance(manifest, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(
            f"{path} is no bundle of compiled-llm compile, or is damaged: its manifest is {manifest!r:.100}"
        )
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{path} must be of format {_FORMAT}, given {manifest.get('format')!r}: export it again")
    other = differences(manifest["machine"], machine_fields())
    if other:
        raise ValueError(f"{path} is for another kind of machine, so it is left alone: {reason(other)}")
    for info in bundle.infolist():
        name = info.filename
        if name == _MANIFEST:
            continue
        inside = _NAME.fullmatch(name) and ".." not in PurePosixPath(name).parts
        if not inside or name not in manifest["files"]:
            raise ValueError(f"{path} holds {name!r}, which is no file of a bundle: do not use it")


def _root() -> Path:
    """The cache directory, with torch's libraries below it."""
    use_own_cache_directory()
    root = cache_directory().resolve()
    inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).resolve()
    if inductor != root / "inductor":
        raise ValueError(
            f"TORCHINDUCTOR_CACHE_DIR must be unset for a bundle, given {str(inductor)!r}: unset it, start again"
        )
    return root
