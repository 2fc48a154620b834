"""Engines that are kept: a run takes that of an earlier run with equal arguments, which saves its start of a second."""

from collections.abc import Iterator

import pytest

from compiled_llm import CompiledEngine, EngineConfig


@pytest.fixture(scope="session")
def kept() -> Iterator[dict[EngineConfig, CompiledEngine]]:
    """The engines that no run uses now, by their arguments."""
    engines: dict[EngineConfig, CompiledEngine] = {}
    yield engines
    for engine in engines.values():
        CompiledEngine.close(engine)


@pytest.fixture(autouse=True)
def _kept_engines(kept: dict[EngineConfig, CompiledEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    start = CompiledEngine.from_config

    def from_config(config: EngineConfig) -> CompiledEngine:
        engine = kept.pop(config, None) or start(config)
        engine.reset_report()
        monkeypatch.setattr(engine, "close", lambda: keep(engine), raising=False)
        return engine

    def keep(engine: CompiledEngine) -> None:
        if engine.has_unfinished_requests() or engine.config in kept:
            CompiledEngine.close(engine)
        else:
            kept[engine.config] = engine

    monkeypatch.setattr(CompiledEngine, "from_config", from_config)
