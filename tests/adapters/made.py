"""Adapters as PEFT saves them, with random numbers, and models with these merged into their weights."""

import copy
import json
import math
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], "bias": "none", "lora_dropout": 0.0,
    "init_lora_weights": True, "inference_mode": True, "task_type": "CAUSAL_LM", "use_rslora": False, "use_dora": False,
    "peft_version": "0.21.2", "megatron_core": "megatron.core", "modules_to_save": None, "rank_pattern": {},
}  # fmt: skip
STRENGTH = 0.3  # of B A, beside weights of 0.2


def linear_modules(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the layers that adapters usually change: all in decoder layers but routers."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__ not in ("Linear", "Conv1D") or name.endswith(
            ("gate", "router", "lm_head", "embed_out")
        ):
            continue
        shape = tuple(module.weight.shape)
        found[name] = shape if isinstance(module, nn.Linear) else shape[::-1]
    return found


def embeddings_and_stacks(model: nn.Module) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int, int]]]:
    """Rows and columns of embeddings; number, outputs and inputs of all experts, by PEFT's names of parameters."""
    embeddings = {
        name: module.weight.shape for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    stacks = {}
    for name, module in model.named_modules():
        if name.endswith(".experts") and hasattr(module, "gate_up_proj"):
            first, second = module.gate_up_proj.shape, module.down_proj.shape
            if getattr(module, "is_transposed", False):
                first, second = ((count, outputs, inputs) for count, inputs, outputs in (first, second))
            stacks |= {f"{name}.base_layer": tuple(first), name: tuple(second)}
    return embeddings, stacks


def write_adapter(
    directory: Path,
    modules: dict[str, tuple[int, int]],
    embeddings: Mapping[str, tuple[int, int]] = types.MappingProxyType({}),
    stacks: Mapping[str, tuple[int, int, int]] = types.MappingProxyType({}),
    *,
    seed: int = 0,
    ranks: Iterable[int] = (),
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter of ``modules``, in a new directory. ``ranks``: of the modules, in their order; else the config's.

    ``embeddings``, ``stacks``: as ``embeddings_and_stacks`` gives them.
    """
    generator = torch.Generator().manual_seed(seed)
    fields = {**CONFIG, "target_modules": sorted([*modules, *embeddings]), **config}
    tensors: dict[str, Tensor] = {}
    of_modules = dict(zip(modules, ranks, strict=False))
    for name, (outputs, inputs) in modules.items():
        rank = of_modules.get(name, fields["r"])
        a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
        b = torch.randn(outputs, rank, generator=generator) * STRENGTH / math.sqrt(rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)

    def random(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale / math.sqrt(fields["r"])).to(dtype)

    for name, (rows, columns) in embeddings.items():
        tensors[f"base_model.model.{name}.lora_embedding_A"] = random(fields["r"], rows, scale=1.0)
        tensors[f"base_model.model.{name}.lora_embedding_B"] = random(columns, fields["r"], scale=STRENGTH)
    for name, (count, outputs, inputs) in stacks.items():
        a = random(count * fields["r"], inputs, scale=math.sqrt(fields["r"] / inputs))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = random(outputs, fields["r"] * count, scale=STRENGTH)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def merged(model: Any, scales: dict[str, float], directory: Path) -> Any:
    """A copy of transformers' model with ``scale * B A`` of each module added to its weight."""
    from safetensors.torch import load_file

    model, tensors = copy.deepcopy(model), load_file(directory / "adapter_model.safetensors")
    for name, scale in scales.items():
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"].float() for x in "AB")
        module = model.get_submodule(name)
        change = scale * b @ a
        module.weight.data += change if isinstance(module, nn.Linear) else change.t()
    return model
