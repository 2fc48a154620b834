"""LLM inference through the PyTorch compiler: ``CompiledEngine(model).generate(prompts, SamplingParams())``.

Names are imported when first asked for, so that ``import compiled_llm.ops`` loads neither transformers nor a device.
"""

import importlib
from typing import TYPE_CHECKING, Any

from compiled_llm.api.version import __version__ as __version__
from compiled_llm.system import clock as _clock  # noqa: F401 - it takes the time of this import

if TYPE_CHECKING:
    from compiled_llm.api.config import EngineConfig as EngineConfig
    from compiled_llm.api.lora_request import LoRARequest as LoRARequest
    from compiled_llm.api.outputs import CompletionOutput as CompletionOutput
    from compiled_llm.api.outputs import EngineStats as EngineStats
    from compiled_llm.api.outputs import Logprob as Logprob
    from compiled_llm.api.outputs import RequestMetrics as RequestMetrics
    from compiled_llm.api.outputs import RequestOutput as RequestOutput
    from compiled_llm.api.outputs import ScoreOutput as ScoreOutput
    from compiled_llm.api.sampling_params import SamplingParams as SamplingParams
    from compiled_llm.api.speculative_config import SpeculativeConfig as SpeculativeConfig
    from compiled_llm.api.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from compiled_llm.compiling.report import CompileReport as CompileReport
    from compiled_llm.compiling.report import GraphReport as GraphReport
    from compiled_llm.engine.admission import PreparedRequest as PreparedRequest
    from compiled_llm.engine.async_engine import AsyncCompiledEngine as AsyncCompiledEngine
    from compiled_llm.engine.check import CheckReport as CheckReport
    from compiled_llm.engine.check import PromptCheck as PromptCheck
    from compiled_llm.engine.engine import CompiledEngine as CompiledEngine
    from compiled_llm.engine.failures import RequestsFailedWarning as RequestsFailedWarning
    from compiled_llm.engine.request_stream import RequestStream as RequestStream
    from compiled_llm.ops.native import MissingCompilerWarning as MissingCompilerWarning
    from compiled_llm.report.machine_limits import MachineLimits as MachineLimits
    from compiled_llm.report.report import RunReport as RunReport
    from compiled_llm.report.report import StepsReport as StepsReport
    from compiled_llm.scheduling.drafter import Drafter as Drafter
    from compiled_llm.step.logits_transforms import Field as Field
    from compiled_llm.step.logits_transforms import LogitsContext as LogitsContext
    from compiled_llm.step.logits_transforms import LogitsTransform as LogitsTransform
    from compiled_llm.text.prompts import EncodedPrompt as EncodedPrompt
    from compiled_llm.worker.memory import MemoryLedger as MemoryLedger
    from compiled_llm.worker.memory import MemoryRow as MemoryRow

_HOMES = {
    "AsyncCompiledEngine": "engine.async_engine",
    "CheckReport": "engine.check",
    "CompileReport": "compiling.report",
    "CompiledEngine": "engine.engine",
    "CompletionOutput": "api.outputs",
    "Drafter": "scheduling.drafter",
    "EncodedPrompt": "text.prompts",
    "EngineConfig": "api.config",
    "EngineStats": "api.outputs",
    "Field": "step.logits_transforms",
    "GraphReport": "compiling.report",
    "LoRARequest": "api.lora_request",
    "LogitsContext": "step.logits_transforms",
    "LogitsTransform": "step.logits_transforms",
    "Logprob": "api.outputs",
    "MachineLimits": "report.machine_limits",
    "MemoryLedger": "worker.memory",
    "MemoryRow": "worker.memory",
    "MissingCompilerWarning": "ops.native",
    "PreparedRequest": "engine.admission",
    "PromptCheck": "engine.check",
    "RequestMetrics": "api.outputs",
    "RequestOutput": "api.outputs",
    "RequestStream": "engine.request_stream",
    "RequestsFailedWarning": "engine.failures",
    "RunReport": "report.report",
    "SamplingParams": "api.sampling_params",
    "ScoreOutput": "api.outputs",
    "SpeculativeConfig": "api.speculative_config",
    "StepsReport": "report.report",
    "StructuredOutputsParams": "api.structured_outputs",
}

__all__ = [*_HOMES, "__version__"]


def __dir__() -> list[str]:
    """Also what was not imported yet, so that it can be completed."""
    loaded = [name for name, value in globals().items() if getattr(value, "__name__", "").startswith(f"{__name__}.")]
    return sorted({*__all__, *loaded, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"compiled_llm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'compiled_llm' has no attribute {name!r}")
