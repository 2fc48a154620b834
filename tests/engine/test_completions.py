"""A request as its user sees it: what its outputs copy, and log-probabilities."""

from collections.abc import Iterator
from typing import Any

import pytest

from compiled_llm.api.outputs import Logprob, RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.completions import Completion, LogprobReader, UserRequest
from compiled_llm.scheduling.request import Request, Status


class Counting(list[Any]):
    """A list that counts the items that are read from it."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.num_read += 1
            yield item

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


class Characters:
    """In the place of OutputText: each token is a character."""

    def __init__(self) -> None:
        self.num_taken = 0
        self._text = ""

    def append(self, token_id: int, may_stop: bool) -> None:
        self._text += chr(token_id)

    def finish(self) -> None:
        pass

    def take(self, finished: bool) -> str:
        taken, self._text = self._text, ""
        self.num_taken += len(taken)
        return taken


def serve(output_kind: str, num_tokens: int, num_idle: int = 0) -> tuple[list[RequestOutput], int]:
    """The outputs of a request with a token a step, two continuations, and how many items were copied for them.

    The second continuation ends with its first token; ``num_idle`` outputs more are asked for in which nothing is new.
    """
    params = SamplingParams(n=2, logprobs=0)
    completions = []
    for index in range(2):
        request = Request(f"{index}", [5], params, 0, frozenset(), num_tokens + 1, arrival_time=0.0)
        request.output_token_ids = Counting()
        text: Any = Characters()
        completions.append(Completion(index, request, text, None))
        completions[-1].logprobs = Counting()
    entry = UserRequest("mine", None, [5], params, completions, output_kind=output_kind)
    outputs = []
    for count in range(1, num_tokens + 1):
        for completion in completions[: 2 if count == 1 else 1]:
            completion.request.output_token_ids.append(97 + count % 26)
            completion.add_logprobs({97 + count % 26: Logprob(-1.0, 1)})
            if count in (1 + (num_tokens - 1) * (completion.index == 0),):
                completion.request.status, completion.request.finish_reason = Status.FINISHED, "length"
                completion.request.finished_time = 1.0
            completion.read_new_tokens()
        if output_kind != "final" or entry.is_finished:
            outputs += [entry.output() for _ in range(1 + (num_idle if count == 1 else 0))]
    lists = [of for completion in completions for of in (completion.request.output_token_ids, completion.logprobs)]
    return outputs, sum(of.num_read for of in lists if isinstance(of, Counting))


def test_deltas_copy_each_token_once() -> None:
    for num_tokens in (50, 500):
        outputs, num_copied = serve("delta", num_tokens)
        assert len(outputs) == num_tokens
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == num_tokens
        assert num_copied <= 3 * (num_tokens + 1), "linear: each is decoded, and copied with its log-probability"


def test_what_has_not_changed_is_not_copied_again() -> None:
    for kind, expected in (("cumulative", 3 + 2 * 50 * 51 // 2 + 50), ("final", 3 + 3 * 50)):
        assert serve(kind, 50)[1] == serve(kind, 50, num_idle=9)[1] == expected


@pytest.mark.parametrize("num_idle", [0, 3])
def test_joined_deltas_are_the_whole(num_idle: int) -> None:
    deltas, cumulative, (final,) = (serve(kind, 30, num_idle)[0] for kind in ("delta", "cumulative", "final"))
    assert cumulative[-1] == final
    assert [output.finished for output in deltas] == [output.finished for output in cumulative]
    for index, whole in enumerate(final.outputs):
        parts = [output.outputs[index] for output in deltas]
        assert "".join(part.text for part in parts) == whole.text
        assert [token_id for part in parts for token_id in part.token_ids] == whole.token_ids
        assert [row for part in parts for row in part.logprobs or []] == whole.logprobs
        assert (parts[-1].finish_reason, parts[-1].cumulative_logprob) == ("length", whole.cumulative_logprob)


class Broken:
    """A tokenizer whose library panics at token 7."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        if token_ids == [7]:
            raise ValueError("the tokenizer cannot decode these tokens")
        return f"<{token_ids[0]}>"


def test_an_alternative_that_cannot_be_decoded_has_no_text() -> None:
    tokenizer: Any = Broken()
    reader = LogprobReader(tokenizer, max_logprobs=20)
    read = reader.read((-1.0, 2, [-0.5, -1.0], [7, 3]), token_id=3, wanted=2)
    assert read == {3: Logprob(-1.0, 2, "<3>"), 7: Logprob(-0.5, 1, None)}


@pytest.mark.parametrize(("wanted", "num_found"), [(0, 1), (1, 2), (2, 3), (-1, 4)])
def test_minus_one_is_as_many_log_probabilities_as_the_engine_gives(wanted: int, num_found: int) -> None:
    """The row has more than that."""
    row = (-9.0, 30, (-0.1, -0.2, -0.3, -0.4, -0.5), (10, 11, 12, 13, 14))
    found = LogprobReader(None, max_logprobs=3).read(row, 20, wanted)
    assert list(found) == [20, 10, 11, 12][:num_found]
