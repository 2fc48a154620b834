"""Times that ``bench kernels`` measured find the launches that were estimated."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_llm.api import tables
from compiled_llm.bench import kernels
from compiled_llm.gpu_step.measured import Unmatched, match, read_measured
from tests.gpu_step.made_up import inspection

GPU = "NVIDIA H100 80GB HBM3"
ASKED = {"shape": "tiny", "batch_size": 8, "context": 1024, "kv_cache_dtype": "auto"}
# As a GPU names them: a library's product has a name of its own, and may be followed by a kernel that adds its parts.
LAYER = ("write_kernel", "split_kernel", "triton_red_fused_norm_11", "nvjet_tst_64x8", "splitKreduce_kernel")
STEP = ("at::native::index_kernel", *LAYER * 4, "direct_copy_kernel_cuda")


def events(names: tuple[str, ...]) -> list[Any]:
    """Launch number n takes n + 1 us, and a gap of 2 us comes after it."""
    found, start = [], 0.0
    for n, name in enumerate(names):
        end = start + n + 1
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda us=end - start: us)
        found.append(
            SimpleNamespace(
                name=name,
                device_type=torch.autograd.DeviceType.CUDA,
                time_range=span,
                cpu_children=[],
                is_user_annotation=False,
            )
        )
        start = end + 2
    return found


def written(path: Path, names: tuple[str, ...], facts: dict[str, Any] | None = None) -> Path:
    """A file as ``bench kernels`` writes it after such a profile."""
    args = argparse.Namespace(model=None, layers=None, cuda_graphs="auto", exact=False, **ASKED)
    step = kernels.medians([kernels.launches(events(names), on_gpu=True)] * 3)
    figures = kernels.figures_of(step, 100.0)
    result = {"benchmark": "kernels"} | kernels.result_of(args, "bfloat16", figures)
    tables.finish(result | {"machine": {"gpu": GPU} if facts is None else facts}, path, kernels.in_order(step))
    return path


def test_each_row_gets_the_mean_of_the_layers_that_it_stands_for(tmp_path: Path) -> None:
    result = read_measured(written(tmp_path / "kernels.json", STEP), ASKED)
    found = match(inspection(), result)
    # Place p of STEP takes p + 1 us. The rows of the first layer stand for three: for the second one on the average.
    layer = [2.0, 3.0, 4.0, 5.0]
    assert found.us == (1.0, *(us + 5 for us in layer), *(us + 15 for us in layer), 22.0)
    assert found.gap_us == (0.0, *[2.0] * 9)
    assert found.unmatched == (Unmatched("splitKreduce_kernel", 4, 6.0 + 11.0 + 16.0 + 21.0),)
    assert found.not_run == ()
    assert found.busy_us == sum(range(1, 23))
    assert found.all_gaps_us == 42
    assert found.gpu == GPU
    assert json.loads(json.dumps(found.as_json()))["unmatched"][0]["launches"] == 4


def test_what_did_not_run_and_what_was_not_expected_is_named(tmp_path: Path) -> None:
    names = (*(name for name in STEP if name != "write_kernel"), "triton_poi_fused_other_2", "Memset (Device)")
    found = match(inspection(), read_measured(written(tmp_path / "kernels.json", names), ASKED))
    assert found.not_run == ("write_kernel", "write_kernel")
    assert found.us[1] is None
    assert found.gap_us[1] is None
    assert {one.name for one in found.unmatched} == {
        "splitKreduce_kernel", "triton_poi_fused_other_2", "Memset (Device)"
    }  # fmt: skip


def test_a_file_of_another_step_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "kernels.json", STEP)
    with pytest.raises(ValueError, match="batch_size 8, asked 32; context 1024, asked 8192"):
        read_measured(path, ASKED | {"batch_size": 32, "context": 8192})
    with pytest.raises(ValueError, match="measured on a CPU"):
        read_measured(written(tmp_path / "cpu.json", STEP, {"cpu": "any"}), ASKED)
    (tmp_path / "other.json").write_text('{"benchmark": "latency"}')
    with pytest.raises(ValueError, match=r"not a result of compiled-llm bench kernels"):
        read_measured(tmp_path / "other.json", ASKED)
    with pytest.raises(ValueError, match="No such file"):
        read_measured(tmp_path / "nothing.json", ASKED)
