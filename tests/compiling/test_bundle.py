"""Bundles: what goes in comes out on a machine of the same kind, and nothing else gets into the cache directory."""

import hashlib
import json
import os
import resource
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from compiled_llm.compiling import bundle as compile_bundle
from compiled_llm.compiling.bundle import export_bundle, import_bundle


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of one function's two files, and an empty cache directory to import it into."""
    use(monkeypatch, tmp_path / "from")
    graphs = tmp_path / "from" / "graphs"
    graphs.mkdir(parents=True)
    files = [graphs / "step-0.graph", graphs / "step-1.graph"]
    for file in files:
        file.write_text(file.name)
    assert export_bundle(tmp_path / "bundle", files) == 2
    use(monkeypatch, tmp_path / "to")
    return tmp_path / "bundle"


def use(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(cache))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))


def rewritten(bundle: Path, change: Callable[[dict, dict[str, bytes]], None]) -> Path:
    """A copy of a bundle; ``change`` may alter its manifest and its contents."""
    with zipfile.ZipFile(bundle) as source:
        contents = {name: source.read(name) for name in source.namelist()}
    manifest = json.loads(contents.pop("manifest.json"))
    change(manifest, contents)
    path = bundle.with_name("rewritten")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("manifest.json", json.dumps(manifest))
        for name, content in contents.items():
            target.writestr(name, content)
    return path


def test_a_bundle_is_taken_in_whole(bundle: Path, tmp_path: Path) -> None:
    assert import_bundle(bundle) == 2
    assert {file.name: file.read_text() for file in (tmp_path / "to" / "graphs").iterdir()} == {
        "step-0.graph": "step-0.graph",
        "step-1.graph": "step-1.graph",
    }


def test_a_bundle_of_another_kind_of_machine_is_refused_with_the_fields_that_differ(bundle: Path) -> None:
    def change(manifest: dict, contents: dict[str, bytes]) -> None:
        manifest["machine"] |= {"torch": "1.0", "cpu": "Z80"}

    with pytest.raises(
        ValueError, match=r"another kind of machine.*cpu is .* and was 'Z80'; torch is .* and was '1.0'"
    ):
        import_bundle(rewritten(bundle, change))


@pytest.mark.parametrize(
    "name",
    ["../outside.so", "/tmp/outside.so", "graphs/../../outside.so", "graphs/./step.so", "elsewhere/step.so", "graphs"],
)
def test_a_name_outside_of_the_cache_is_refused_and_nothing_is_written(bundle: Path, tmp_path: Path, name: str) -> None:
    def change(manifest: dict, contents: dict[str, bytes]) -> None:
        contents[name] = b""
        manifest["files"][name] = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

    with pytest.raises(ValueError, match="which is no file of a bundle"):
        import_bundle(rewritten(bundle, change))
    assert not list((tmp_path / "to").rglob("*.*"))


def test_a_damaged_bundle_is_refused_and_nothing_is_written(bundle: Path, tmp_path: Path) -> None:
    def another_byte(manifest: dict, contents: dict[str, bytes]) -> None:
        contents["graphs/step-0.graph"] = b"other"

    def unlisted(manifest: dict, contents: dict[str, bytes]) -> None:
        contents["graphs/step-2.graph"] = b""

    def missing(manifest: dict, contents: dict[str, bytes]) -> None:
        del contents["graphs/step-0.graph"]

    def no_machine(manifest: dict, contents: dict[str, bytes]) -> None:
        manifest["machine"] = "x86"

    def no_manifest(manifest: dict, contents: dict[str, bytes]) -> None:
        manifest.clear()

    for change, said in (
        (another_byte, "damaged: graphs/step-0.graph"),
        (unlisted, "which is no file of a bundle"),
        (missing, "no bundle of compiled-llm compile, or is damaged"),
        (no_machine, "no bundle of compiled-llm compile, or is damaged"),
        (no_manifest, "no bundle of compiled-llm compile, or is damaged: its manifest is {}"),
    ):
        with pytest.raises(ValueError, match=said):
            import_bundle(rewritten(bundle, change))
    content = bytearray(bundle.read_bytes())
    content[content.index(b"PK", 4) - 8] ^= 255  # in the first file's compressed bytes
    bundle.write_bytes(content)
    with pytest.raises(ValueError, match="no bundle"):
        import_bundle(bundle)
    bundle.write_bytes(b"PK")
    with pytest.raises(ValueError, match="no bundle"):
        import_bundle(bundle)
    assert not list((tmp_path / "to").rglob("*.*"))


def test_a_cache_of_torchs_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path / "from")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="TORCHINDUCTOR_CACHE_DIR must be unset"):
        export_bundle(tmp_path / "bundle", [])
    with pytest.raises(ValueError, match="TORCHINDUCTOR_CACHE_DIR must be unset"):
        import_bundle(tmp_path / "bundle")


def test_a_bundle_that_unpacks_to_too_much_is_refused_before_it_is_read(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 50, 50))  # type: ignore
    with pytest.raises(ValueError, match="and 50 are free in the cache directory"):
        import_bundle(bundle)
    monkeypatch.setattr(compile_bundle, "_MAX_BYTES", 100)
    with pytest.raises(ValueError, match="too much for a bundle"):
        import_bundle(bundle)


def test_what_a_bundle_unpacks_to_does_not_count_in_memory(bundle: Path, tmp_path: Path) -> None:
    """A hundred megabytes out of a file of a hundred kilobytes."""
    content = bytes(100 << 20)

    def bomb(manifest: dict, contents: dict[str, bytes]) -> None:
        contents["graphs/step-0.graph"] = content
        manifest["files"]["graphs/step-0.graph"] = hashlib.sha256(content).hexdigest()

    path = rewritten(bundle, bomb)
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        assert import_bundle(path) == 2
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "to" / "graphs" / "step-0.graph").stat().st_size == len(content)


def test_more_than_a_file_says_is_not_unpacked(bundle: Path, tmp_path: Path) -> None:
    """A size in the zip's list that is smaller than what comes out."""

    def longer(manifest: dict, contents: dict[str, bytes]) -> None:
        contents["graphs/step-0.graph"] = bytes(1 << 20)

    path = rewritten(bundle, longer)
    content = path.read_bytes()
    size = (1 << 20).to_bytes(4, "little")
    assert content.count(size) == 2  # in front of the file and in the list
    path.write_bytes(content.replace(size, (1000).to_bytes(4, "little")))
    with pytest.raises(ValueError, match="damaged"):
        import_bundle(path)
    assert not list((tmp_path / "to").rglob("*.*"))


def test_a_bundle_of_very_many_files_is_refused_before_they_are_listed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def many(manifest: dict, contents: dict[str, bytes]) -> None:
        contents |= {f"graphs/{number}.graph": b"" for number in range(2000)}

    path = rewritten(bundle, many)
    monkeypatch.setattr(compile_bundle, "_MAX_INDEX_BYTES", 1000)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    with pytest.raises(ValueError, match="too many files"):
        import_bundle(path)
    os.mkfifo(tmp_path / "fifo")
    for no_file in (tmp_path, tmp_path / "fifo", tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(ValueError, match="must be a file, a bundle"):
            import_bundle(no_file)


def test_what_the_disk_does_not_take_is_not_the_bundles_fault(bundle: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            import_bundle(bundle)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "to").rglob("*.*"))


def test_nothing_of_an_import_stays_beside_what_it_brings(bundle: Path, tmp_path: Path) -> None:
    import_bundle(bundle)
    import_bundle(bundle)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["graphs", "inductor"]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "to" / "graphs").iterdir()} == {0o600}


def test_a_cache_directory_that_others_may_write_to_takes_no_bundle(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to").chmod(0o777)
    with pytest.raises(ValueError, match="others than its owner may write to"):
        import_bundle(bundle)
