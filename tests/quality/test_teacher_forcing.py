"""teacher_forcing: the windows of a text, the check of a cache's scales, which layers are worth keeping."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.models.config_file import read_config
from compiled_llm.step.kv_cache import allocate


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        import teacher_forcing

        yield teacher_forcing


def test_layers_worth_keeping(script: ModuleType) -> None:
    assert script.worth_keeping({0: 1.0, 1: 1.0, 2: 1.1, 3: 0.9}) == []
    assert script.worth_keeping({0: 1.0, 1: 9.0, 2: 1.0, 4: 1.0, 5: 8.0, 6: 1.0}) == [1, 5]
    assert script.worth_keeping({0: 0.0, 1: 0.0}) == []


def test_windows_predict_every_token_once(script: ModuleType) -> None:
    documents = [list(range(100, 121)), [7], [], list(range(50, 53))]
    windows = script.cut_windows(documents, 8, None, torch.device("cpu"))
    assert [len(window.token_ids) for window in windows] == [8, 8, 4, 2]
    assert [token for window in windows for token in window.targets.tolist()] == [*range(101, 121), 51, 52]
    assert all(torch.equal(window.targets, window.token_ids + 1) for window in windows)
    assert [len(w.token_ids) for w in script.cut_windows(documents, 8, 11, torch.device("cpu"))] == [8, 3]
    with pytest.raises(ValueError, match="two tokens"):
        script.cut_windows([[1], []], 8, None, torch.device("cpu"))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_every_scale_that_was_written_is_checked(script: ModuleType, bad: float) -> None:
    config = read_config(DEMO_MODEL)
    dtypes = [torch.int8, torch.float32, torch.float8_e4m3fn, torch.int8]
    cache = allocate(config, dtypes, num_blocks=4, block_size=16, device=torch.device("cpu"))
    for layer in cache:
        for scale in (layer.k_scale, layer.v_scale):
            if scale is not None:
                scale[:2] = 0.5
    script.check_scales(cache, 0, 32)
    assert cache[2].v_scale is not None
    cache[2].v_scale[1, 1, 4] = bad
    script.check_scales(cache, 0, 20)
    script.check_scales(cache, 21, 32)
    with pytest.raises(script.BadScaleError, match="layer 2: the scale of the values of token 20, KV head 1, is"):
        script.check_scales(cache, 10, 21)
