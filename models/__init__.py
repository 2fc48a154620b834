"""Decoder-only models as pure functions of (weights, StepInput, KVCache).

A family is one file. It declares its weights (``Weights``), the tensors of its Hugging Face checkpoint
(``checkpoint_shapes``), how the two meet (``assemble``), and the function: ``forward``, and ``head_step`` for the
logits; the first also in parts that can be compiled one by one (``Stream``, ``embed_step``, ``layer_step``). To add a
family: write the file, name its architectures in ``ARCHITECTURES``, and add its config to ``tests/families.py``; the
graph-break, loader and equality tests then run for it.
"""

import importlib
from types import ModuleType

# Architecture, as it stands in config.json -> the file of its family, imported when asked for.
# This is the allow-list: nothing else is ever run, whatever a model directory asks for.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
}
# For messages: what these are to a user.
SUPPORTED = (
    "Supported are Llama (Llama 2, 3, 3.1, 3.2 and other models of architecture LlamaForCausalLM) and dense Qwen3 "
    "(Qwen3ForCausalLM); docs/models.md lists them"
)


def family(architecture: str) -> ModuleType:
    """The module of an architecture's family. ``ValueError`` for one that is not supported."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"config.json: architecture {architecture!r:.100} is not supported. {SUPPORTED}")
    return importlib.import_module(f"compiled_llm.models.{ARCHITECTURES[architecture]}")
