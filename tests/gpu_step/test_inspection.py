"""A whole step counts the layers that were not generated like the last one that was."""

import pytest
import torch

from compiled_llm.gpu_step.amounts import Contexts
from compiled_llm.gpu_step.estimate import GAP_SECONDS, L2_SECONDS, Estimate
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.gpu_step.launches import Launch, TritonKernel
from compiled_llm.gpu_step.work import work_of
from compiled_llm.scheduling.bucket import Bucket
from tests.gpu_step.made_up import LAUNCHES, US, inspection


def test_layers_that_were_left_out_count_as_the_last_one() -> None:
    made = inspection()
    assert made.launches_per_layer == [4]
    assert made.num_launches == len(LAUNCHES) + 2 * 4 == 18
    names = [made.rows[place].launch.name for place in made.order]
    assert names == [LAUNCHES[0][0], *[name for name, _, _ in LAUNCHES[1:5]] * 4, "clone"]
    assert made.seconds() == pytest.approx(18 * (US / 1e6 + GAP_SECONDS))
    assert made.num_bytes == 18 * 1500
    assert made.flops == 18 * 100
    values = made.as_json()
    assert (values["launches"], values["step_bytes"], len(values["rows"])) == (18, 18 * 1500, 10)


def test_joining_comes_after_the_longest_of_the_limits() -> None:
    estimate = Estimate(memory=2e-6, issue=3e-6, matrix=1e-6, join=4 * L2_SECONDS)
    assert estimate.seconds == pytest.approx(3e-6 + 4 * L2_SECONDS)
    assert estimate.bound_by == "issue"


@pytest.mark.parametrize("kept", [0, 3])
def test_rows_of_a_table_count_alone(kept: int) -> None:
    """Three of its rows, and those of activations that are kept besides."""
    table, indices, out = torch.empty(40960, 128), torch.empty(3, dtype=torch.int32), torch.empty(3, 128)
    arguments = {"x": table, "indices": indices, "kept": table, "out": out, "num_rows": kept, "SIZE": 128, "BLOCK": 128}
    kernel = TritonKernel(None, arguments, {}, (3 + kept, 1))
    launch = Launch("keep_rows_kernel", "op", "table_rows", (table, indices), (out,), kernel)
    work = work_of(launch, Contexts.of(Bucket("decode", 3, 3), 1024))
    assert work.written == (3 + kept) * 128 * 4
    assert work.read == work.written + 3 * 4


def test_gpus_that_differ_in_their_memory_alone_run_the_same_code() -> None:
    assert GPUS["h200"].runs_code_of(GPUS["h100"])
    assert not GPUS["a100"].runs_code_of(GPUS["h100"])
    assert not GPUS["b200"].runs_code_of(GPUS["h200"])
