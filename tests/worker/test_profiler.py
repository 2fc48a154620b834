"""StepProfiler: which steps, what is what by name, and that a second run leaves everything as it was."""

import types
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.worker import profiler as profiler_module
from compiled_llm.worker.profiler import KINDS, StepProfiler, kind_of, seconds_by_kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("compiled_llm::packed_linear", "linears"),
        ("compiled_llm::paged_attention", "attention"),
        ("aten::addmm", "linears"),
        ("aten::mm", "linears"),
        ("aten::mmap", None),
        ("compiled_llm::greedy_tokens", "sampling"),
        ("aten::sort", "sampling"),
        ("triton_red_fused_argmax_3", "sampling"),
        ("triton_poi_fused_mul_silu_2", None),
        ("split_kernel", "attention"),
        ("compiled_llm::short_convolution", "states"),
        ("convolution_outputs_kernel", "states"),
        ("compiled_llm::gated_delta_rule", "states"),
        ("delta_factors_kernel", "states"),
        ("compiled_llm::mamba2_scan_exact", "states"),
        ("scan_steps_kernel", "states"),
        ("compiled_llm::gated_rms_norm", "states"),
        ("gated_norm_kernel", "states"),
        ("gated_kernel", None),
        ("nvjet_hsh_64x64_64x16_1x2_h_bz_TNN", "linears"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "linears"),
    ],
)
def test_kinds_by_name(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_kernels_are_told_apart_by_name_and_by_the_samplers_range() -> None:
    """A GPU's profile, made up: microseconds on the device."""

    def event(name: str, start: float, end: float, device: Any = torch.autograd.DeviceType.CUDA) -> Any:
        span = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        is_range = name in ("Torch-Compiled Region: 0/0", "compiled_llm::step", "compiled_llm::sampler")
        return types.SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=is_range)

    events = [
        event("cudaGraphLaunch", 0, 900, torch.autograd.DeviceType.CPU),
        event("compiled_llm::step", 100, 160),
        event("Torch-Compiled Region: 0/0", 100, 160),
        event("nvjet_tst_64x8", 100, 130),
        event("split_kernel", 130, 140),
        event("delta_steps_kernel", 140, 145),
        event("triton_poi_fused_0", 150, 160),
        event("compiled_llm::sampler", 160, 180),
        event("triton_red_fused_1", 165, 180),
    ]
    seconds = seconds_by_kind(events, on_gpu=True)
    assert {kind: round(value * 1e6) for kind, value in seconds.items()} == {
        "linears": 30,
        "attention": 10,
        "states": 5,
        "sampling": 15,
        "everything else": 20,  # a kernel, and the gaps between kernels
    }


def test_a_profile_without_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's older profiler gives it for a replayed graph: its CPU's side alone."""
    monkeypatch.setattr(profiler_module, "begin_step_of_trees", lambda: None)
    monkeypatch.setattr(profiler_module, "profiled_events", lambda run, on_gpu: [])
    profiler = StepProfiler(3, torch.device("cuda"))
    with pytest.warns(UserWarning, match="the profile of decode_8 has no kernel"):
        profiler.profile("decode_8", lambda: torch.zeros(1), None, 0.0)
    assert profiler.shares("decode_8") is None


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_gpus_profile_is_asked_for_its_kernels(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    asked: list[Any] = []
    ran: list[str] = []

    class Profile:
        def __init__(self, activities: Any) -> None:
            asked.extend(activities)

        def __enter__(self) -> "Profile":
            return self

        def __exit__(self, *what: object) -> None:
            ran.append("ended")

        def events(self) -> list[str]:
            return ["event"]

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("waited"))
    assert profiler_module.profiled_events(lambda: ran.append("ran"), on_gpu) == ["event"]
    kinds = torch.profiler.ProfilerActivity
    assert asked == ([kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU])
    assert ran == ["ran", *["waited"] * on_gpu, "ended"]


def test_early_and_late_steps_are_profiled() -> None:
    profiler = StepProfiler(3, torch.device("cpu"))
    due = []
    for number in range(1, 40):
        if profiler.is_due("decode_1"):
            due.append(number)
            profiler.num_steps["decode_1"] = profiler.num_steps.get("decode_1", 0) + 1
    assert due == [1, 4, 16]
    assert profiler.shares("decode_1") is None


@pytest.mark.parametrize("overlaps", [False, True])
def test_profiled_steps_change_no_token_and_no_count(overlaps: bool) -> None:
    params = [SamplingParams(temperature=t, seed=1, max_tokens=10, ignore_eos=True) for t in (0, 0.8, 0)]
    prompts = [[5, 6, 7], [8, 9], list(range(20, 60))]
    arguments = {"enforce_eager": True, "dtype": "float32", "bucket_sizes": (1, 4), "max_model_len": 128}
    results, stats = [], []
    with CompiledEngine(**arguments, async_scheduling=overlaps, enable_prefix_caching=False) as engine:
        for profile_steps in (0, 100):
            engine.reset_report(profile_steps=profile_steps)
            outputs = engine.generate(prompts, params, use_tqdm=False)
            results.append([output.outputs[0].token_ids for output in outputs])
            report = engine.report(measure_limits=False)
            stats.append((report.stats.num_steps, report.trace["steps"][0]["count"]))
        shares = report.device_shares
    assert results[0] == results[1]
    assert stats[0] == stats[1]
    assert sum(report.profiled_steps.values()) >= 3
    assert report.profile_seconds > 0
    assert shares is not None
    assert set(shares) == set(KINDS)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for kind, share in shares.items() if kind not in ("sampling", "states"))


def test_one_disturbed_profile_of_several_changes_no_share() -> None:
    profiler = StepProfiler(3, torch.device("cpu"))
    quiet = dict(zip(KINDS, (1.0, 0.0, 6.0, 1.0, 2.0), strict=True))
    profiler._seconds["decode_1"] = [quiet, {**quiet, "sampling": 100.0}, quiet]
    assert profiler.shares("decode_1") == dict(zip(KINDS, (0.1, 0.0, 0.6, 0.1, 0.2), strict=True))
