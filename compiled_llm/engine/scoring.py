"""What ``score`` asks of the engine, and makes of its answer."""

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.outputs import RequestOutput, ScoreOutput
from compiled_llm.api.sampling_params import SamplingParams


def scoring_params(top_logprobs: int, most: int, split_special_tokens: bool | None = None) -> SamplingParams:
    """The parameters of a request that is scored. Without ``top_logprobs`` nobody sees the text of a token.

    Raises:
        ValueError: ``top_logprobs`` is not from -1 to ``most``, the engine's ``max_logprobs``, or the other no bool.
    """
    integer("top_logprobs", top_logprobs, -1, most)
    has_text = top_logprobs != 0
    return SamplingParams(
        prompt_logprobs=top_logprobs,
        detokenize=has_text,
        temperature=0,
        output_kind="final",
        split_special_tokens=split_special_tokens,
    )


def score_output(output: RequestOutput, has_top_logprobs: bool) -> ScoreOutput:
    """The finished request of a ``ScoredPrompt``, as its user sees it."""
    (completion,) = output.outputs
    scored = output.prompt_logprobs or []
    start = next((index for index, row in enumerate(scored) if row is not None), 0)
    rows = [row for row in scored[start:] if row is not None]
    error = None
    if completion.finish_reason != "length":
        error = str(completion.stop_reason or completion.finish_reason)
    # The first entry of a row is that of the token itself.
    own = [next(iter(row.values())) for row in rows]
    if error is not None:
        own, rows = [], []
    return ScoreOutput(
        prompt=output.prompt,
        token_ids=output.prompt_token_ids,
        start=start,
        logprobs=[found.logprob for found in own],
        ranks=[found.rank for found in own],
        metrics=output.metrics,
        top_logprobs=rows if has_top_logprobs else None,
        num_cached_tokens=output.num_cached_tokens,
        error=error,
    )
