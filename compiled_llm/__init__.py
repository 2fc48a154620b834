"""LLM inference through the PyTorch compiler: ``CompiledEngine(model).generate(prompts, SamplingParams())``.

Names are imported when first asked for, so that ``import compiled_llm.ops`` loads neither transformers nor a device.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiled_llm.compiling.report import CompileReport, GraphReport
    from compiled_llm.config import EngineConfig
    from compiled_llm.engine.async_engine import AsyncCompiledEngine
    from compiled_llm.engine.engine import CompiledEngine
    from compiled_llm.engine.failures import RequestsFailedWarning
    from compiled_llm.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput
    from compiled_llm.report.report import RunReport
    from compiled_llm.sampling_params import SamplingParams
    from compiled_llm.scheduling.drafter import Drafter
    from compiled_llm.step.logits_transforms import Field, LogitsContext, LogitsTransform
    from compiled_llm.structured_outputs import StructuredOutputsParams
    from compiled_llm.worker.memory import MemoryLedger, MemoryRow

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
    "StructuredOutputsParams": "structured_outputs",
}

__all__ = [
    "AsyncCompiledEngine",
    "CompileReport",
    "CompiledEngine",
    "CompletionOutput",
    "Drafter",
    "EngineConfig",
    "EngineStats",
    "Field",
    "GraphReport",
    "LogitsContext",
    "LogitsTransform",
    "Logprob",
    "MemoryLedger",
    "MemoryRow",
    "RequestMetrics",
    "RequestOutput",
    "RequestsFailedWarning",
    "RunReport",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"compiled_llm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'compiled_llm' has no attribute {name!r}")
