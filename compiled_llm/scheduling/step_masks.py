"""The masks of a step: which tokens its requests may have. Plain Python."""

from collections.abc import Iterable

from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request

# Why a request ends whose mask has no token.
_NO_TOKEN_ALLOWED = "bad_words and allowed_token_ids leave no token to go on with"


def add_masks(masked: Iterable[tuple[int, Request]], output: SchedulerOutputBuilder) -> None:
    """Add the masks of a step whose tokens are all chosen.

    ``masked``: (index in the step, request) of each request that samples under a mask.
    A request whose mask fails ends once the step is done, without the token that the step samples.
    """
    for index, request in masked:
        assert request.mask is not None
        # The token to be chosen is counted in num_tokens already.
        num_drafts = len(request.draft_token_ids)
        num_output_tokens = request.num_tokens - 1 - num_drafts - len(request.prompt_token_ids)
        try:
            words = request.mask.words(request.output_token_ids, num_output_tokens)
        except Exception as error:  # of a grammar's library: this request fails, and no other
            request.pending_error = f"{type(error).__name__}: {error}"
            continue
        if words is None:
            request.pending_error = _NO_TOKEN_ALLOWED
        else:
            output.masks.append((index, 0, words))
            after_drafts = enumerate(request.draft_masks[:num_drafts], 1)
            output.masks.extend([(index, place, words) for place, words in after_drafts])
