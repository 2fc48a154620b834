"""The answers of the routes as classes, for /openapi.json. They are made as plain dicts (answers.py, routes.py), which
the tests hold against these."""

from typing import Any, Literal

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
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


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
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


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
    parent: str | None
    max_model_len: int


class Models(Described):
    object: Literal["list"]
    data: list[Model]


class State(Described):
    status: Literal["ok"]
    engines: list[str] | UnsetType = UNSET


class Version(Described):
    version: str


class Load(Described):
    server_load: int
    running: int
    waiting: int


# -- Responses, messages and scores


class Response(Described, forbid_unknown_fields=False):
    """Fields that repeat the request are left out here."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    usage: dict[str, Any] | None


class ResponseEvent(Described, forbid_unknown_fields=False):
    type: str
    sequence_number: int


class DeletedResponse(Described):
    id: str
    object: Literal["response"]
    deleted: bool


class MessageUsage(Described):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Described, forbid_unknown_fields=False):
    type: str


class MessageTokens(Described):
    input_tokens: int


class MessageErrorContent(Described):
    type: str
    message: str


class MessageError(Described):
    type: Literal["error"]
    error: MessageErrorContent


class Score(Described):
    index: int
    object: Literal["score"]
    score: float
    is_greedy: bool
    token_ids: list[int]
    tokens: list[str]
    logprobs: list[float]
    ranks: list[int]
    top_logprobs: PromptLogprobs | UnsetType = UNSET


class Scores(Described):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


# -- About the server


class ServerInfo(Described):
    version: str
    versions: dict[str, str]
    models: list[str]
    engine: dict[str, Any]
    sizes: dict[str, int]
    server: dict[str, Any]


class TokenizerInfo(Described, forbid_unknown_fields=False):
    chat_template: str | None


class Reset(Described):
    reset: bool


class Aborted(Described):
    aborted: int


class Drained(Described):
    moved: int


class TakenOver(Described):
    facts: str
    proof: str
