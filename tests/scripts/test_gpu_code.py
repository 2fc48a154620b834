"""gpu_code: what is gathered from a cache, in which order, and within which room."""

import os
from pathlib import Path

import pytest

from tests.scripts.test_gpu_validate import ROOT, load

gpu_code = load(ROOT / "scripts" / "gpu_code.py")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two programs and three kernels, one of them in two versions; the later a file, the newer."""
    files = {
        "inductor/ab/old.py": "def call(args): 1",
        "inductor/cd/new.py": "def call(args): 2",
        "inductor/cd/kernel.py": "no program",
        "triton/1/triton_poi_fused_add.cubin": "add",
        "triton/2/split_kernel.cubin": "old",
        "triton/3/split_kernel.cubin": "new",
        "triton/4/broken.cubin": "broken",
    }
    for age, (name, text) in enumerate(files.items()):
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1000 + age, 1000 + age))
    return tmp_path / "cache"


@pytest.fixture
def cuobjdump(tmp_path: Path) -> Path:
    path = tmp_path / "cuobjdump"
    path.write_text(
        '#!/bin/sh\ngrep -q broken "$2" && exit 1\n'
        '[ "$1" = --dump-resource-usage ] && echo "head" && echo " REG:32 STACK:0" || echo "code of $(cat "$2")"\n'
    )
    path.chmod(0o755)
    return path


def test_programs_and_machine_code_the_newest_of_each_name(
    cache: Path, cuobjdump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = gpu_code.gather(cache, tmp_path / "out", cuobjdump, 1 << 20)
    assert (counts["programs"], counts["sass"], counts["left out"]) == (2, 2, 1)
    assert "broken: CalledProcessError" in capsys.readouterr().err
    assert (tmp_path / "out/sass/split_kernel.sass").read_text() == "REG:32 STACK:0\ncode of new\n"
    assert [path.stem for path in gpu_code.kernels(cache)] == ["broken", "split_kernel", "triton_poi_fused_add"]
    assert {path.name for path in (tmp_path / "out/programs").iterdir()} == {"old.py", "new.py"}


def test_what_does_not_fit_is_counted(cache: Path, cuobjdump: Path, tmp_path: Path) -> None:
    room = len("REG:32 STACK:0\ncode of new\n") + 5
    counts = gpu_code.gather(cache, tmp_path / "out", cuobjdump, room)
    tiles = list((ROOT / "ops" / "tiles").rglob("*.json"))
    assert (counts["sass"], counts["programs"], counts["left out"]) == (1, 0, 4 + len(tiles))
    assert (tmp_path / "out/sass/split_kernel.sass").is_file(), "the engine's own come first"
