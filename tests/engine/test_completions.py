"""Log-probabilities as the user reads them."""

from typing import Any

from compiled_llm.engine.completions import LogprobReader
from compiled_llm.outputs import Logprob


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
