"""The check of a cache's scales, and which layers are worth keeping."""

import math

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.models.config_file import read_config
from compiled_llm.quality import teacher_forcing
from compiled_llm.quantizing.texts import Window
from compiled_llm.step.kv_cache import allocate


def test_layers_worth_keeping() -> None:
    assert teacher_forcing.worth_keeping({0: 1.0, 1: 1.0, 2: 1.1, 3: 0.9}) == []
    assert teacher_forcing.worth_keeping({0: 1.0, 1: 9.0, 2: 1.0, 4: 1.0, 5: 8.0, 6: 1.0}) == [1, 5]
    assert teacher_forcing.worth_keeping({0: 0.0, 1: 0.0}) == []


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_every_scale_that_was_written_is_checked(bad: float) -> None:
    config = read_config(DEMO_MODEL)
    dtypes = [torch.int8, torch.float32, torch.float8_e4m3fn, torch.int8]
    cache = allocate(config, dtypes, num_blocks=4, block_size=16, device=torch.device("cpu"))
    for layer in cache:
        for scale in (layer.k_scale, layer.v_scale):
            if scale is not None:
                scale[:2] = 0.5
    teacher_forcing.check_scales(cache, 0, 32)
    assert cache[2].v_scale is not None
    cache[2].v_scale[1, 1, 4] = bad
    teacher_forcing.check_scales(cache, 0, 20)
    teacher_forcing.check_scales(cache, 21, 32)
    with pytest.raises(
        teacher_forcing.BadScaleError, match="layer 2: the scale of the values of token 20, KV head 1, is"
    ):
        teacher_forcing.check_scales(cache, 10, 21)


@pytest.mark.parametrize("chunk", [3, 100])
def test_what_is_put_before_a_text_is_not_scored(chunk: int) -> None:
    model = teacher_forcing.load_model(EngineConfig(dtype="float32"))
    ids = torch.arange(100, 121, dtype=torch.int32)
    other_targets = torch.cat([ids[-5:], ids[6:]])
    dtypes = [torch.int8] * model.config.num_layers

    def compared(window: Window) -> teacher_forcing.Comparison:
        return teacher_forcing.compare(model, model, dtypes, [window], chunk)

    whole, scored = compared(Window(ids[:-1], ids[1:])), compared(Window(ids[:-1], ids[1:], 5))
    torch.testing.assert_close(scored.kl, whole.kl[5:])
    assert compared(Window(ids[:-1], other_targets, 5)).losses == scored.losses != whole.losses
