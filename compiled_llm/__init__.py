"""LLM inference through the PyTorch compiler: ``CompiledEngine(model).generate(prompts, SamplingParams())``.

Names are imported when first asked for, so that ``import compiled_llm.ops`` loads neither transformers nor a device.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiled_llm.compiling.report import CompileReport as CompileReport
    from compiled_llm.compiling.report import GraphReport as GraphReport
    from compiled_llm.config import EngineConfig as EngineConfig
    from compiled_llm.engine.async_engine import AsyncCompiledEngine as AsyncCompiledEngine
    from compiled_llm.engine.engine import CompiledEngine as CompiledEngine
    from compiled_llm.engine.failures import RequestsFailedWarning as RequestsFailedWarning
    from compiled_llm.outputs import CompletionOutput as CompletionOutput
    from compiled_llm.outputs import EngineStats as EngineStats
    from compiled_llm.outputs import Logprob as Logprob
    from compiled_llm.outputs import RequestMetrics as RequestMetrics
    from compiled_llm.outputs import RequestOutput as RequestOutput
    from compiled_llm.outputs import ScoreOutput as ScoreOutput
    from compiled_llm.report.report import RunReport as RunReport
    from compiled_llm.sampling_params import SamplingParams as SamplingParams
    from compiled_llm.scheduling.drafter import Drafter as Drafter
    from compiled_llm.step.logits_transforms import Field as Field
    from compiled_llm.step.logits_transforms import LogitsContext as LogitsContext
    from compiled_llm.step.logits_transforms import LogitsTransform as LogitsTransform
    from compiled_llm.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from compiled_llm.worker.memory import MemoryLedger as MemoryLedger
    from compiled_llm.worker.memory import MemoryRow as MemoryRow

__version__ = "0.1.0"

_HOMES = {
    "AsyncCompiledEngine": "engine.async_engine",
    "CompiledEngine": "engine.engine",
    "CompileReport": "compiling.report",
    "CompletionOutput": "outputs",
    "Drafter": "scheduling.drafter",
    "EngineConfig": "config",
    "EngineStats": "outputs",
    "Field": "step.logits_transforms",
    "GraphReport": "compiling.report",
    "LogitsContext": "step.logits_transforms",
    "LogitsTransform": "step.logits_transforms",
    "Logprob": "outputs",
    "MemoryLedger": "worker.memory",
    "MemoryRow": "worker.memory",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestsFailedWarning": "engine.failures",
    "RunReport": "report.report",
    "SamplingParams": "sampling_params",
    "ScoreOutput": "outputs",
    "StructuredOutputsParams": "structured_outputs",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"compiled_llm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'compiled_llm' has no attribute {name!r}")
