"""Text to token ids and back, over transformers' tokenizers; incremental decoding with stop strings."""

from pathlib import Path

from transformers import AutoTokenizer

from compiled_llm.sampling_params import SamplingParams

# Tokens before the output that decoding looks at: how a token reads may depend on those before it.
_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a model directory, from its ``tokenizer.json``. Never runs code of the directory."""

    def __init__(self, directory: Path) -> None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises whatever the first unreadable file leads to
            raise ValueError(f"{directory}: no readable tokenizer: {type(error).__name__}: {error}") from error
        if not tokenizer.is_fast:
            raise ValueError(f"{directory}: the tokenizer needs a tokenizer.json; save it again with transformers")
        self._backend = tokenizer.backend_tokenizer
        # A file may ask for either; a prompt is never cut or filled up here.
        self._backend.no_truncation()
        self._backend.no_padding()
        # Text of a user that spells a special token is text, not that token.
        self._backend.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with what the model wants around a prompt (its begin-of-text token, say)."""
        return self._backend.encode(text).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


class OutputText:
    """The text of one request's output as its tokens come in, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stops: tuple[str, ...] = tuple(params.stop or ())
        self._text = ""
        # Decoding goes over ids[start:], of which ids[start:read] are in the text already.
        self._ids = prompt_token_ids[-_CONTEXT_TOKENS:]
        self._start, self._read = 0, len(self._ids)

    def append(self, token_id: int) -> str | None:
        """Take in a token. Returns the stop string that the text now holds, if any; the text then ends there."""
        self._ids.append(token_id)
        known, decoded = self._decode(self._start, self._read), self._decode(self._start, len(self._ids))
        # A character of several bytes may be spread over tokens; until it is whole it decodes to a replacement.
        if len(decoded) <= len(known) or decoded.endswith(_REPLACEMENT):
            return None
        self._start, self._read = self._read, len(self._ids)
        return self._extend(decoded[len(known) :])

    def finish(self) -> str | None:
        """No token follows: bytes that never became a character stand as replacements. May complete a stop string."""
        known, decoded = self._decode(self._start, self._read), self._decode(self._start, len(self._ids))
        self._start = self._read = len(self._ids)
        return self._extend(decoded[len(known) :])

    def text(self, finished: bool) -> str:
        """The text so far. While the request runs, an end that may become a stop string is held back."""
        if finished:
            return self._text
        held = 0
        for stop in self._stops:
            longest = min(len(stop) - 1, len(self._text))
            held = max(held, next((n for n in range(longest, 0, -1) if self._text.endswith(stop[:n])), 0))
        return self._text[: len(self._text) - held]

    def _extend(self, delta: str) -> str | None:
        searched = len(self._text)
        self._text += delta
        # A stop string may begin in the text before the new piece.
        found = [(self._text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stops]
        found = [item for item in found if item[0] >= 0]
        if not found:
            return None
        position, stop = min(found, key=lambda item: item[0])
        self._text = self._text[: position + (len(stop) if self._params.include_stop_str_in_output else 0)]
        return stop

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], self._params.skip_special_tokens)
