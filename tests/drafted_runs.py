"""Plain decoding and decoding with drafts, of the same requests: for tests that both give the same."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.scheduling.request import RequestId

Work = list[tuple[str | list[int], SamplingParams]]
KINDS = ("right", "wrong", "half right")
NUM_TOKENS = 20  # of each output
_TEXT = (
    "def read_rows(path, separator):\n    with open(path) as file:\n        rows = [line.split(separator) for line in"
)
_PARAMS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


class RecordedDrafter:
    """Knows what plain decoding gave.

    Attributes:
        kind: one of ``KINDS``: how much of a proposal is right.
        answers: of each continuation: prompt and output.
    """

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        self.num_tokens, self.vocab_size = num_tokens, vocab_size
        self.kind = "right"
        self.answers: dict[RequestId, list[int]] = {}
        self._rng = random.Random(num_tokens)

    def record(self, outputs: dict[str, RequestOutput]) -> None:
        self.answers = {
            RequestId(name, completion.index): output.prompt_token_ids + completion.token_ids
            for name, output in outputs.items()
            for completion in output.outputs
        }

    def propose(self, request_id: RequestId, token_ids: Sequence[int]) -> list[int]:
        answer, start = self.answers[request_id], len(token_ids)
        assert list(token_ids) == answer[:start], "what was accepted is not what plain decoding gives"
        # Past the end of the answer, which stop strings and stop tokens cut, anything may be proposed.
        tokens = [*answer[start : start + self.num_tokens], *[1] * self.num_tokens][: self.num_tokens]
        right = {"right": self.num_tokens, "wrong": 0}.get(self.kind, self._rng.randint(0, self.num_tokens))
        return [*tokens[:right], *((token + 1) % self.vocab_size for token in tokens[right:])]


def work_of(engine: CompiledEngine, most_prompts: int = 5) -> Work:
    """Requests of every kind, for the demo model. Some end by a stop token or a stop string in mid-output.

    ``most_prompts``: with stop tokens and stop strings.
    """
    greedy = SamplingParams(temperature=0, logprobs=3, **_PARAMS)
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=7, logprobs=2, **_PARAMS)
    prompts = [_TEXT, _TEXT[:40], _TEXT[:7], "import os", _TEXT + " file]\n    return rows\n\n\ndef"]
    plain = engine.generate(prompts, greedy, use_tqdm=False)
    work: Work = [(prompt, params) for prompt in prompts for params in (greedy, sampled)]
    for prompt, output in list(zip(prompts, plain, strict=True))[:most_prompts]:
        completion = output.outputs[0]
        for place in (2, 5, 8):
            stop = dataclasses.replace(greedy, stop_token_ids=[completion.token_ids[place]])
            work.append((prompt, stop))
        middle = len(completion.text) // 2
        for length in (1, 4):
            stop = dataclasses.replace(greedy, stop=[completion.text[middle : middle + length]])
            work += [
                (prompt, stop),
                (prompt, dataclasses.replace(stop, include_stop_str_in_output=True, logprobs=None)),
            ]
    work += [
        (prompts[1], dataclasses.replace(sampled, n=3)),
        (prompts[0], dataclasses.replace(greedy, prompt_logprobs=2)),
        (prompts[2], dataclasses.replace(greedy, presence_penalty=1.0)),
        (prompts[3], dataclasses.replace(sampled, bad_words=["import"], min_tokens=3)),
        (prompts[1], dataclasses.replace(greedy, structured_outputs={"regex": "[a-z]{4,12}"}, ignore_eos=False)),
        (prompts[4], dataclasses.replace(sampled, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)),
        (prompts[0], dataclasses.replace(sampled, max_tokens=1)),
        (prompts[0], dataclasses.replace(sampled, max_tokens=3)),
    ]
    return work


def serve(engine: CompiledEngine, work: Work) -> dict[str, RequestOutput]:
    """The last output of each request, by its place in ``work``; they arrive one or two a step."""
    outputs: dict[str, RequestOutput] = {}
    waiting = list(enumerate(work))
    while waiting or engine.has_unfinished_requests():
        for index, (prompt, params) in waiting[:2]:
            engine.add_request(str(index), prompt, params)
        del waiting[:2]
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def facts(output: RequestOutput) -> tuple:
    """All of an output that decoding decides."""
    return output.prompt_token_ids, output.prompt_logprobs, list(output.outputs)


def check_equal(work: Work, plain: dict[str, RequestOutput], drafted: dict[str, RequestOutput]) -> None:
    """Tokens, texts, reasons and log-probabilities, exactly."""
    assert plain.keys() == drafted.keys()
    for name, output in plain.items():
        assert facts(drafted[name]) == facts(output), f"request {name}: {work[int(name)]}"
