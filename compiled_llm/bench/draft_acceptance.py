"""How often a network's drafts are right, beside what rejection sampling would accept of them.

Rejection sampling accepts a draft with the probability that the model's distribution p and the drafter's q share, the
sum of min(p, q) over all tokens, and no rule that keeps p accepts more (Leviathan et al., 2023, arXiv:2211.17192). Here
a draft is right if it is the token that the model samples with the same noise, which is less often. Both are counted
of the drafts behind which all others of their step were right.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.sampling import SamplingInput, sample


class _Guess(NamedTuple):
    """The drafter's logits [V] of the token at a position, and how it is sampled: fields of one row."""

    logits: Tensor
    params: SamplingInput


class DraftAcceptance:
    """Looks on while an engine drafts with a network, in this process, uncompiled, on a CPU.

    Requests must have seeds of their own, a temperature, and nothing else that changes distributions.

    Attributes:
        num_tried, num_right: drafts.
        shared: the sum of the probability that p and q share at these.
    """

    def __init__(self, engine: CompiledEngine) -> None:
        runner = engine.own_runner
        assert runner.steps.drafting is not None
        self.num_tried = self.num_right = 0
        self.shared = 0.0
        self._store = runner.rows
        self._guesses: dict[tuple[int, int], _Guess] = {}  # by seed and position
        runner.watch = self._step
        runner.steps.drafting.watch(self._draft)

    @property
    def rate(self) -> float:
        """The share of drafts that were right."""
        return self.num_right / max(1, self.num_tried)

    @property
    def optimum(self) -> float:
        """The share that rejection sampling would accept."""
        return self.shared / max(1, self.num_tried)

    def _draft(self, logits: Tensor, params: SamplingInput) -> Tensor:
        for row, (seed, position) in enumerate(zip(params.seed.tolist(), params.position.tolist(), strict=True)):
            own = SamplingInput(*(field[row : row + 1].clone() for field in params))
            self._guesses[seed, position] = _Guess(logits[row].clone(), own)
        return sample(logits, params)

    def _step(self, output: SchedulerOutput, bucket: Bucket, run: Callable[[], Tensor]) -> Tensor:
        logits, end = run(), 0
        columns = output.request_ids, output.first_rows(), output.num_samples, output.num_computed_tokens
        for (name, first_row, num_samples, start), count in zip(
            zip(*columns, strict=True), output.num_scheduled_tokens, strict=True
        ):
            end += count
            seed = int(self._store.parameters["seed"][self._store.row_of(name)])
            drafts = output.token_ids[end - num_samples + 1 : end] if num_samples else ()
            for place, draft in enumerate(drafts):
                guess = self._guesses[seed, start + count - num_samples + 1 + place]
                row = logits[first_row + place][None]
                self.num_tried += 1
                self.shared += _shared(row, guess)
                if int(sample(row, guess.params)) != draft:
                    break
                self.num_right += 1
        return logits


def _shared(logits: Tensor, guess: _Guess) -> float:
    """The probability that the model's distribution, of ``logits`` [1, V], and the drafter's have in common."""
    temperature = float(guess.params.temperature)
    own = torch.full_like(logits[0], -torch.inf, dtype=torch.float32)  # a drafter may have fewer tokens
    own[: len(guess.logits)] = guess.logits.float()
    if temperature == 0:
        return float(logits[0].argmax() == own.argmax())
    p, q = ((row / temperature).softmax(-1) for row in (logits[0].float(), own))
    return float(torch.minimum(p, q).sum())
