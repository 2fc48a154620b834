"""The answers of the routes as classes, for /openapi.json. They are made as plain dicts (answers.py, routes.py), which
the tests hold against these."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length"] | None


class Described(Struct, forbid_unknown_fields=True):
    """Fields with the default ``UNSET`` may be missing."""


# -- Errors


class ErrorContent(Described):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Described):
    error: ErrorContent


# -- Parts of answers


class PromptTokenDetails(Described):
    cached_tokens: int


class Usage(Described):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenDetails


class PromptToken(Described):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptToken] | None]  # by token id


# -- Completions


class CompletionLogprobs(Described):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Described):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Described):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Described):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# -- Chats


class TokenLogprob(Described):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Described):
    content: list[ChatToken]
    refusal: None


class ChatMessage(Described):
    role: Literal["assistant"]
    content: str


class ChatDelta(Described):
    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChoice(Described):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Described):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Described):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(Described):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


# -- Tokens, models, states


class Tokens(Described):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Text(Described):
    prompt: str


class Model(Described):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(Described):
    object: Literal["list"]
    data: list[Model]


class State(Described):
    status: Literal["ok"]


class Version(Described):
    version: str


class Load(Described):
    server_load: int
    running: int
    waiting: int
