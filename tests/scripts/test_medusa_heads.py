"""How Medusa heads are trained: what rows they learn from, and the loss whose gradient is made along with it."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.scripts.test_gpu_validate import load

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.syspath_prepend(str(REPOSITORY / "scripts"))  # it imports the scripts that trained the model
        yield load(REPOSITORY / "scripts" / "medusa_heads.py")


def test_the_gradient_that_is_made_along_is_that_of_the_loss(script: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, head = (torch.randn(count, 8, generator=generator) for count in (6, 20))
    targets = torch.randint(20, (6,), generator=generator)
    found = []
    for loss_of in (lambda x: script._Guessed.apply(x, head, targets), lambda x: F.cross_entropy(x @ head.T, targets)):
        x = rows.clone().requires_grad_()
        loss = 3 * loss_of(x)
        loss.backward()
        found.append((loss.detach(), x.grad))
    for own, wanted in zip(*found, strict=True):
        torch.testing.assert_close(own, wanted)


def test_what_the_model_wrote_is_learned_and_no_prompt(script: ModuleType, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    teacher = Qwen3ForCausalLM(Qwen3Config(vocab_size=40, num_hidden_layers=1, head_dim=16, **sizes)).eval()
    texts = np.random.default_rng(0).integers(40, size=(2, 12)).astype(np.uint16)
    np.savez(tmp_path / "texts.npz", texts=texts, prompt_lengths=np.array([3, 6]))
    hidden, following = script.learned_rows(teacher, [], argparse.Namespace(texts=tmp_path / "texts.npz"))
    # The last token of a prompt is the first row: the model's next token is of its own.
    places = [(0, row) for row in range(2, 7)] + [(1, row) for row in range(5, 7)]
    assert following.tolist() == [texts[text, row + 2 : row + 2 + script.NUM_HEADS].tolist() for text, row in places]
    with torch.no_grad():
        states = teacher.model(input_ids=torch.from_numpy(texts.astype(np.int64))).last_hidden_state
    wanted = torch.stack([states[place] for place in places])
    torch.testing.assert_close(hidden.float(), wanted, atol=0.1, rtol=0.1)
