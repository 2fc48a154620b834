"""/score: how likely given continuations are. Its fields are the arguments of ``CompiledEngine.score``."""

import time
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.names import refuse_unknown_fields
from compiled_llm.api.readable import shown
from compiled_llm.openai.answers import LEAST, TokenTexts, readable, usage
from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.server.answers import found_logprobs
from compiled_llm.server.messages import Output
from compiled_llm.server.service import Served, ServedPrompt
from compiled_llm.text.prompts import scored_prompts

SCORE_FIELDS = (
    *("prompt", "continuations", "top_logprobs", "split_special_tokens", "model", "priority", "cache_salt", "user"),
)
_TYPES = {"model": str, "cache_salt": str, "split_special_tokens": bool}
_ELSEWHERE = {
    **dict.fromkeys(("query", "text_1", "queries", "messages"), "give prompt"),
    **dict.fromkeys(("items", "text_2", "documents", "continuation"), "give continuations"),
    **dict.fromkeys(("label_token_ids", "item_first", "apply_softmax"), "give continuations, as texts or token ids"),
}


def read_score(body: Mapping[str, Any], max_logprobs: int) -> OpenAIRequest:
    """A body, as values of JSON; a null is as no field. ``ValueError``: it is wrong."""
    body = {name: value for name, value in body.items() if value is not None}
    refuse_unknown_fields(body, SCORE_FIELDS, _ELSEWHERE)
    salt, top, priority = body.get("cache_salt", ""), body.get("top_logprobs", 0), body.get("priority", 0)
    integer("top_logprobs", top, 0, max_logprobs)
    integer("priority", priority, -(2**31), 2**31 - 1)
    for name, kind in _TYPES.items():
        if name in body and not isinstance(body[name], kind):
            allowed = "true or false" if kind is bool else "a str"
            raise ValueError(f"{name} must be {allowed}, given {shown(body[name])}")
    prompts = []
    for item in scored_prompts(body.get("prompt", []), body.get("continuations")):
        if isinstance(item, ValueError):
            raise item
        if not isinstance(item.prompt, str | list):
            allowed = "a str or a list of token ids, or a list of these"
            raise ValueError(f"prompt must be {allowed}, given {shown(item.prompt)}")
        key = "prompt" if isinstance(item.prompt, str) else "prompt_token_ids"
        prompts.append(item._replace(prompt={key: item.prompt, "cache_salt": salt}))
    if not prompts:
        raise ValueError("prompt must be given, and continuations not be empty")
    split = body.get("split_special_tokens", False)
    sampling = {"prompt_logprobs": top, "detokenize": top != 0, "temperature": 0, "split_special_tokens": split}
    return OpenAIRequest("score", body.get("model"), prompts, sampling=sampling, priority=priority, cache_salt=salt)


class ScoreAnswer:
    """The answer to one request: a score for each continuation.

    Args:
        model: its name there.
        texts: of the model's tokens.
    """

    def __init__(self, served: Served, model: str, request_id: str, texts: TokenTexts) -> None:
        self._served, self._model, self._request_id, self._texts = served, model, request_id, texts

    async def whole(self) -> dict[str, Any]:
        indices = {prompt.request_id: index for index, prompt in enumerate(self._served.prompts)}
        scores: dict[int, dict[str, Any]] = {}
        num_cached_tokens = 0
        async for output in self._served.outputs:
            index = indices[output.request_id]
            scores[index] = self._score(index, self._served.prompts[index], output)
            num_cached_tokens += output.num_cached_tokens
        num_tokens = sum(len(prompt.token_ids) for prompt in self._served.prompts)
        return {
            "id": f"score-{self._request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": [scores[index] for index in sorted(scores)],
            "usage": usage(num_tokens, 0, num_cached_tokens),
        }

    def _score(self, index: int, prompt: ServedPrompt, output: Output) -> dict[str, Any]:
        rows = [found_logprobs(row) for row in output.prompt_logprobs or () if row is not None]
        own = [next(iter(row.values())) for row in rows]  # the first of a row is the token itself
        token_ids = prompt.token_ids[prompt.scored_from :]
        assert len(own) == len(token_ids), (len(own), len(token_ids))
        logprobs = [max(found.logprob, LEAST) for found in own]
        score: dict[str, Any] = {
            "index": index,
            "object": "score",
            "score": sum(logprobs),
            "is_greedy": all(found.rank == 1 for found in own),
            "token_ids": token_ids,
            "tokens": [self._texts.text_of(token_id) for token_id in token_ids],
            "logprobs": logprobs,
            "ranks": [found.rank for found in own],
        }
        if self._served.params.prompt_logprobs:
            score["top_logprobs"] = [readable(row) for row in rows]
        return score
