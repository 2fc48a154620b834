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
    }
    for age, (name, text) in enumerate(files.items()):
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1000 + age, 1000 + age))
    return tmp_path / "cache"


def test_programs_and_machine_code_the_newest_of_each_name(cache: Path, tmp_path: Path) -> None:
    counts = gpu_code.gather(cache, tmp_path / "out", 1 << 20)
    assert (counts["programs"], counts["kernels"], counts["left out"]) == (2, 2, 0)
    assert (tmp_path / "out/kernels/split_kernel.cubin").read_text() == "new"
    assert [path.stem for path in gpu_code.kernels(cache)] == ["split_kernel", "triton_poi_fused_add"]
    assert {path.name for path in (tmp_path / "out/programs").iterdir()} == {"old.py", "new.py"}


def test_what_does_not_fit_is_counted(cache: Path, tmp_path: Path) -> None:
    counts = gpu_code.gather(cache, tmp_path / "out", len("new") + 2)
    tiles = list((ROOT / "ops" / "tiles").rglob("*.json"))
    assert (counts["kernels"], counts["programs"], counts["left out"]) == (1, 0, 3 + len(tiles))
    assert (tmp_path / "out/kernels/split_kernel.cubin").is_file(), "the engine's own come first"
