"""Whether an engine is exact: said by name where it is not, and refused where it has to be."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from compiled_llm import CompiledEngine, LogitsContext, LogitsTransform
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.ops import native
from compiled_llm.worker import exactness

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = read_config(DEMO_MODEL)


class Plain(LogitsTransform):
    """Changes nothing."""

    name = "plain"
    fields: ClassVar = {}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        return {}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        return logits


@pytest.mark.parametrize(
    ("device", "linears", "given", "reasons"),
    [
        (CPU, Packed, {}, []),
        (CPU, Packed, {"exact": True}, []),
        (CPU, Dense, {}, ["linear layers of the kind Dense"]),
        (CPU, Packed, {"logits_transforms": [Plain()]}, ["logits_transforms"]),
        (GPU, Dense, {}, ["on a GPU"]),
        (GPU, Dense, {"logits_transforms": [Plain()]}, ["on a GPU", "logits_transforms"]),
        (GPU, Exact, {"exact": True}, []),
    ],
)
def test_reasons_are_named(
    device: torch.device, linears: LinearKind, given: dict[str, Any], reasons: list[str]
) -> None:
    found = exactness.obstacles(EngineConfig(**given), device, linears, MODEL)
    assert len(found) == len(reasons)
    for obstacle, reason in zip(found, reasons, strict=True):
        assert re.search(reason, obstacle.what)
    assert exactness.described(found) == "yes" if not reasons else re.match(r"no \(.*\)$", exactness.described(found))


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiler", lambda: None)
    (obstacle,) = exactness.obstacles(EngineConfig(), CPU, Dense, MODEL)
    assert "no C++ compiler" in obstacle.what
    with pytest.raises(ValueError, match=r"exact must be False here, given True: no C\+\+ compiler.*apt install g\+\+"):
        exactness.obstacles(EngineConfig(exact=True), CPU, Dense, MODEL)


@pytest.mark.parametrize(
    ("device", "linears", "given"),
    [(CPU, Dense, {}), (GPU, Dense, {}), (CPU, Packed, {"logits_transforms": [Plain()]})],
)
def test_exact_is_refused_where_it_cannot_hold(
    device: torch.device, linears: LinearKind, given: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="exact must be False here, given True: "):
        exactness.obstacles(EngineConfig(exact=True, **given), device, linears, MODEL)


def test_an_engine_says_whether_it_is_exact(capfd: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"bucket_sizes": (2,), "num_kv_blocks": 20, "max_model_len": 64, "enforce_eager": True}
    with CompiledEngine(exact=True, **sizes) as engine:
        assert engine.report(measure_limits=False).exact == "yes"
        assert "Exact: yes." in engine.report(measure_limits=False).page()
    assert "; same results in any batch: yes\n" in capfd.readouterr().err
    with CompiledEngine(logits_transforms=[Plain()], **sizes) as engine:
        assert engine.report(measure_limits=False).exact.startswith("no (logits_transforms are compiled")
    with pytest.raises(ValueError, match="leave logits_transforms out"):
        CompiledEngine(exact=True, logits_transforms=[Plain()], **sizes)
