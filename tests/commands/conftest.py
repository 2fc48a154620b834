"""An engine of the demo model that the tests of the commands share: no command starts one of its own."""

import contextlib
from collections.abc import Iterator

import pytest

from compiled_llm import CompiledEngine


@pytest.fixture(scope="package")
def _shared() -> Iterator[CompiledEngine]:
    sizes = {"bucket_sizes": (1, 2), "token_bucket_sizes": (64,), "num_kv_blocks": 64, "max_model_len": 256}
    with CompiledEngine(enforce_eager=True, progress="off", **sizes) as engine:
        yield engine


@pytest.fixture
def engine(_shared: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> CompiledEngine:
    """The engine that commands get, whatever their flags say of it."""
    monkeypatch.setattr(CompiledEngine, "from_config", lambda config: contextlib.nullcontext(_shared))
    return _shared
