"""Scores over HTTP are those of ``score``, to the bit, and what is wrong with a request is said by name."""

from typing import Any

import pytest

from compiled_llm import CompiledEngine
from tests.server.conftest import Running

PROMPT, CHOICES = "def add(a, b):\n    return", [" a + b", " a - b", " None"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_those_of_the_engine(path: str, reference: CompiledEngine, running: Running) -> None:
    body = {"prompt": PROMPT, "continuations": CHOICES, "top_logprobs": 2}
    answer = running.http.post(path, json=body).json()
    wanted = reference.score(PROMPT, CHOICES, top_logprobs=2, use_tqdm=False)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    for found, score in zip(answer["data"], wanted, strict=True):
        assert (found["logprobs"], found["ranks"]) == (score.logprobs, score.ranks)
        assert (found["score"], found["is_greedy"]) == (score.cumulative_logprob, score.is_greedy)
        assert found["token_ids"] == score.token_ids[score.start :]
        assert "".join(found["tokens"]) in CHOICES
        tops = [{str(token_id): one.logprob for token_id, one in row.items()} for row in score.top_logprobs or ()]
        assert [{key: one["logprob"] for key, one in row.items()} for row in found["top_logprobs"]] == tops
    assert answer["usage"]["prompt_tokens"] == sum(len(score.token_ids) for score in wanted)


def test_prompts_of_token_ids_and_prompts_alone(reference: CompiledEngine, running: Running) -> None:
    token_ids = reference.tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    for body, (prompts, continuations) in (
        ({"prompt": [token_ids], "continuations": [[5, 6]]}, ([token_ids], [[5, 6]])),
        ({"prompt": [PROMPT, "import os"]}, ([PROMPT, "import os"], None)),
    ):
        found = running.http.post("/score", json=body).json()["data"]
        wanted = reference.score(prompts, continuations, use_tqdm=False)
        assert [one["logprobs"] for one in found] == [score.logprobs for score in wanted]
        assert "top_logprobs" not in found[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "continuation": "b"}, "continuation is not served: a name of other libraries; give continu"),
        ({"query": "a", "items": ["b"]}, "give prompt"),
        ({"continuations": ["b"]}, "continuations must be as many as the prompts, 0"),
        ({"prompt": []}, "prompt must be given"),
        ({"prompt": {"a": 1}}, "prompt must be a str or a list of token ids"),
        ({"prompt": "a", "continuations": ["b", None]}, "continuation must be a str or a list of token ids"),
        ({"prompt": "import os", "continuations": ""}, "continuation must be a str or a list of token ids"),
        ({"prompt": "a", "continuations": ["b"] * 2000}, "must be at most 1024, given 2000"),
        ({"prompt": "a", "top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20"),
        ({"prompt": "a", "cache_salt": 1}, "cache_salt must be a str"),
        ({"prompt": [[1, 10**7]]}, "must be integers from 0 to"),
    ],
)
def test_what_is_refused(body: dict[str, Any], words: str, running: Running) -> None:
    refused = running.http.post("/score", json=body)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
