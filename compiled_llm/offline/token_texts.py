"""Tokens as OpenAI's answers have them: by their bytes, as text where these are whole characters, and their offsets."""

from collections.abc import Sequence

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.text.token_bytes import TokenBytes
from compiled_llm.text.tokenizer import OutputText, Tokenizer


class TokenTexts:
    """For the answers of one engine.

    Args:
        tokenizer: None: the model has none, and tokens have names such as "token_id:7".
        skip_special_tokens: of the run's sampling parameters.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)

    def bytes_of(self, token_id: int) -> bytes | None:
        return None if self._bytes is None else self._bytes.of(token_id)

    def text_of(self, token_id: int, mark: str = "") -> str:
        r"""The token as text. Bytes that are no whole characters are written as ``\xe4``, after ``mark``."""
        data = self.bytes_of(token_id)
        if data is None:
            return self.name_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return mark + data.decode("ascii", "backslashreplace")

    def name_of(self, token_id: int) -> str:
        """Another name of the token, which no other one has."""
        return f"token_id:{token_id}"

    def offsets_of(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], skip_special_tokens: bool | None = None
    ) -> list[int]:
        """For each token the characters of the output's text before that which it begins with, or is a part of.

        Args:
            skip_special_tokens: of the row; None: the run's.
        """
        if self._tokenizer is None:
            return [0] * len(token_ids)
        skips = self._skip_special_tokens if skip_special_tokens is None else skip_special_tokens
        text = OutputText(self._tokenizer, list(prompt_token_ids), SamplingParams(skip_special_tokens=skips))
        offsets, length = [], 0
        for token_id in token_ids:
            offsets.append(length)
            text.append(token_id)
            length += len(text.take(finished=False))
        return offsets
