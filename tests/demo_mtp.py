"""A checkpoint of the demo model with a layer for multi-token prediction, as `scripts/mtp_layer.py` writes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.bench.speculation import edit_prompts
from tests.drafting_networks import Drafted, record_drafts
from tests.scripts.test_gpu_validate import load

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "compiled_llm" / "demo_model"
DRAFTING = {"method": "mtp", "num_speculative_tokens": 4, "adaptive": False}


@contextmanager
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """``mtp_layer`` and ``train_heads``."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.syspath_prepend(str(REPOSITORY / "scripts"))  # they import each other and those that trained the model
        yield load(REPOSITORY / "scripts" / "mtp_layer.py"), load(REPOSITORY / "scripts" / "train_heads.py")


def drawn(mtp_layer: ModuleType, directory: Path) -> tuple[Any, Qwen3ForCausalLM]:
    """A layer whose every weight counts, written to ``directory`` with its model, and the model."""
    teacher = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval().requires_grad_(False)
    torch.manual_seed(0)
    student = mtp_layer.Mtp(teacher)
    with torch.no_grad():
        for weight in student.parameters():
            spread = weight.std() if weight.ndim > 1 else 0.3
            weight.copy_((weight + 0.5 * spread * torch.randn_like(weight)).bfloat16())
    mtp_layer.write(student, teacher, {n: w.bfloat16() for n, w in student.state_dict().items()}, directory)
    return student, teacher


def served(model: Path, drafting: dict[str, Any] | None, **arguments: Any) -> tuple[list[list[int]], list[Drafted]]:
    """Tokens of two edits of code, greedy and sampled, and all that was drafted for them."""
    arguments |= {"speculative_config": drafting, "enforce_eager": True, "num_kv_blocks": 64, "progress": "off"}
    arguments |= {"bucket_sizes": (2,), "token_bucket_sizes": (64,)}
    with CompiledEngine(str(model), **arguments) as engine:
        found = record_drafts(engine) if drafting else []
        params = [SamplingParams(temperature=one, max_tokens=16, seed=1, ignore_eos=True) for one in (0, 1)]
        outputs = engine.generate(edit_prompts(2), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], found
