"""What heads draft behind a step, of tensors that say which rows they have read."""

import dataclasses

import pytest
import torch
from torch import Tensor

from compiled_llm.models.draft_heads.medusa import MedusaConfig, Weights, logits_of
from compiled_llm.models.linears.dense import Dense
from compiled_llm.step.drafting import NO_DRAFT, DraftInput
from compiled_llm.step.head_drafting import draft_medusa_function
from compiled_llm.step.sampling import SamplingInput

SIZE, NUM_DRAFTS = 12, 2


def medusa_config() -> MedusaConfig:
    """Of heads without blocks: each gives the logits of the hidden state itself."""
    return MedusaConfig(
        "LlamaForCausalLM", SIZE, SIZE, SIZE, 0, 1, 1, 2, 1e-5, (), 64, False, "float32", (),
        block_names=((), ()), head_names=(), draft_vocab_size=SIZE, bias=False, is_normed=True,
    )  # fmt: skip


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def greedy(count: int) -> SamplingInput:
    zeros, ones, places = torch.zeros(count), torch.ones(count), torch.zeros(count, dtype=torch.int32)
    return SamplingInput(zeros, ones, places + SIZE, zeros, zeros, torch.zeros(count, dtype=torch.int64), places)


def test_medusa_heads_read_the_row_of_the_last_right_token() -> None:
    """Of four requests no draft, one and both were right, and the fourth is padding. Row i of the step says token i."""
    logits_rows, token_rows, right = (0, 3, 6, 0), (0, 3, 8, 0), ((), (4,), (6, 5), ())
    last_tokens = torch.full((9,), 1)
    token_ids = torch.full((4, NUM_DRAFTS + 1), 2, dtype=torch.int32)
    for request, found in enumerate(right):
        for place, token_id in enumerate(found):
            token_ids[request, place + 1] = last_tokens[logits_rows[request] + place] = token_id
    known = DraftInput(
        int32(*logits_rows), int32(3, 3, 3, 0), token_ids, int32(9, 9, 9, 0), int32(20, 20, 20, 0),
        torch.zeros(4, 8, dtype=torch.int32), None, greedy(4), int32(*token_rows),
    )  # fmt: skip
    weights = Weights(None, ((), ()), (), None, torch.ones(1), head=Dense(torch.eye(SIZE)))
    drafts = torch.full((5, NUM_DRAFTS), 99)
    draft_medusa_function(medusa_config(), 8, SIZE)(weights, known, torch.eye(SIZE)[:11], last_tokens, drafts)
    assert drafts.tolist() == [[0, 0], [4, 4], [10, 10], [NO_DRAFT] * 2, [99, 99]]


class Counted(Dense):
    """Counts its products."""

    num_products = 0

    def apply(self, x: Tensor) -> Tensor:
        Counted.num_products += 1
        return super().apply(x)


@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("num_own", [0, 1, 2])
def test_a_matrix_that_heads_share_is_read_once(num_own: int, has_map: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's, or one of their own; matrices of each head are read one by one."""
    monkeypatch.setattr(Counted, "num_products", 0)
    generator = torch.Generator().manual_seed(0)
    blocks, matrices = (torch.randn(2, SIZE, SIZE, generator=generator) for _ in range(2))
    token_ids = torch.randperm(2 * SIZE, generator=generator)[:SIZE] if has_map else None
    heads = tuple(Counted(matrices[number]) for number in range(num_own))
    weights = Weights(
        None, tuple((Dense(one),) for one in blocks), heads, token_ids, torch.ones(1), head=Counted(matrices[0])
    )
    config = dataclasses.replace(medusa_config(), vocab_size=(1 + has_map) * SIZE)
    x = torch.randn(3, SIZE, generator=generator)
    found = logits_of(weights, 2, x, config)
    assert Counted.num_products == max(1, num_own)
    for number, logits in enumerate(found):
        rows = x + torch.nn.functional.silu(x @ blocks[number].T)
        wanted = rows @ matrices[number if num_own == 2 else 0].T
        if token_ids is not None:
            wanted = torch.full((3, 2 * SIZE), -torch.inf).index_copy(1, token_ids, wanted)
        torch.testing.assert_close(logits, wanted)
