"""StepLogprobs: brings the log-probabilities of a step to the completions, prompts and beams that asked for them."""

from collections.abc import Mapping, Sequence

from compiled_llm.api.speculative_config import MOST_DRAFT_TOKENS
from compiled_llm.engine.beam_search import BeamGroup
from compiled_llm.engine.completions import Completion, LogprobReader, UserRequest
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import LogprobColumns

# The rows of a request's tokens without a tree of drafts: one after the other.
_NO_TREE = range(1 + MOST_DRAFT_TOKENS)


class StepLogprobs:
    """For requests that ``completions`` and ``beams`` know, mappings that change with the engine's work."""

    def __init__(
        self,
        reader: LogprobReader,
        completions: Mapping[Request, tuple[UserRequest, Completion]],
        beams: Mapping[Request, BeamGroup],
    ) -> None:
        self._reader, self._completions, self._beams = reader, completions, beams

    def of_tokens(
        self,
        requests: Sequence[Request],
        output: SchedulerOutput,
        logprobs: LogprobColumns,
        advanced: Sequence[Request],
        paths: Mapping[Request, Sequence[int]],
    ) -> None:
        """``logprobs`` of the tokens that a step of ``requests`` sampled; for the others see ``Scheduler``."""
        first_row_of = dict(zip(requests, output.first_rows(), strict=True))
        for request in advanced:
            wanted = request.sampling_params.logprobs
            if wanted is None or request.finish_reason == "error":
                continue
            row, has_text = first_row_of[request], request.sampling_params.detokenize
            if request in self._completions:
                completion = self._completions[request][1]
                new_token_ids = request.output_token_ids[completion.num_logprobs :]
                for place, token_id in zip(paths.get(request, _NO_TREE), new_token_ids, strict=False):
                    values = logprobs.row(row + place)
                    completion.add_logprobs(self._reader.read(values, token_id, wanted, has_text))
            elif request in self._beams:
                _, _, top_logprobs, top_ids = logprobs.row(row)
                self._beams[request].take(request, top_ids, top_logprobs)

    def of_prompts(self, requests: Sequence[Request], output: SchedulerOutput, logprobs: LogprobColumns) -> None:
        """``logprobs`` of the ``prompt_targets`` of a step of ``requests``."""
        rows = zip(*logprobs, strict=True)
        for index, place, targets in output.prompt_targets:
            found = [next(rows) for _ in targets]
            entry = self._completions[requests[index]][0] if requests[index] in self._completions else None
            if entry is None or entry.params.prompt_logprobs is None:
                continue
            count, has_text = entry.params.prompt_logprobs, entry.params.detokenize
            tokens = zip(found, targets, strict=True)
            read_all = [self._reader.read(row, token_id, count, has_text) for row, token_id in tokens]
            entry.add_prompt_logprobs(output.num_computed_tokens[index] + place + 1, read_all)
