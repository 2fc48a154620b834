"""/tokenize and /detokenize, as vLLM has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.api.names import refuse_unknown_fields
from compiled_llm.api.readable import shown
from compiled_llm.openai.requests import CHAT_OPTIONS, chat_options, check_messages, flag
from compiled_llm.server.service import Service
from compiled_llm.text.prompts import check_token_ids, check_unicode

TEXT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
CHAT_FIELDS = ("model", "messages", "return_token_strs", *CHAT_OPTIONS)
DETOKENIZE_FIELDS = ("model", "tokens")


def tokens_of(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a text or a conversation. ``ValueError`` as for a prompt."""
    is_chat = "messages" in body
    _check(service, body, CHAT_FIELDS if is_chat else TEXT_FIELDS)
    if is_chat:
        token_ids = service.chat_prompt(check_messages(body["messages"]), chat_options(body)).token_ids
    else:
        prompt, special = body.get("prompt"), flag(body, "add_special_tokens", True)
        if not isinstance(prompt, str):
            raise ValueError(f"prompt must be a str, given {shown(prompt)}")
        if service.tokenizer is None:
            raise ValueError("the model has no tokenizer")
        check_unicode("prompt", prompt)
        token_ids = service.tokenizer.encode(prompt) if special else service.tokenizer.encode_piece(prompt)
    found: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.started.max_model_len,
        "tokens": token_ids,
    }
    if flag(body, "return_token_strs"):
        found["token_strs"] = [service.texts.text_of(token_id) for token_id in token_ids]
    return found


def text_of(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of tokens. ``ValueError``: they are none."""
    _check(service, body, DETOKENIZE_FIELDS)
    token_ids = body.get("tokens")
    if not isinstance(token_ids, list):
        raise ValueError(f"tokens must be a list of token ids, given {shown(token_ids)}")
    check_token_ids("tokens", token_ids, service.started.vocab_size)
    return {"prompt": service.decode(token_ids, skip_special_tokens=False)}


def _check(service: Service, body: Mapping[str, Any], known: Sequence[str]) -> None:
    refuse_unknown_fields(body, known, {})
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ValueError(f"model must be a str, given {shown(model)}")
    service.check_model(model)
