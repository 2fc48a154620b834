"""CompiledLM: the engine as a model of lm-eval (EleutherAI's lm-evaluation-harness), by the name ``compiled-llm``.

    import lm_eval, compiled_llm.quality.lm_eval_model
    lm_eval.simple_evaluate(model="compiled-llm", model_args={"pretrained": DIR, "dtype": "bfloat16"}, tasks=[...])

``compiled-llm report lm-eval`` is lm-eval's command line with this model. Tokens, windows and chat prompts are those of
lm-eval's own ``hf`` model, so that results compare.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.quality.lm_eval_requests import cut_context, sampling_params

logger = logging.getLogger(__name__)

Pair = tuple[tuple[str, str] | None, list[int], list[int]]  # (key of lm-eval's cache, context, continuation)


@register_model("compiled-llm")
class CompiledLM(TemplateLM):
    """A model of lm-eval that an engine serves.

    The engine batches by itself, by its ``bucket_sizes``: it gets all requests of a call at once, whatever
    ``batch_size`` lm-eval says, which says one even where nobody asked.

    Args:
        pretrained: a directory or hub id; None: the bundled demo model.
        engine: one that exists already, in the place of ``pretrained`` and ``engine_args``.
        max_gen_toks: most tokens to generate, where a task says nothing.
        add_bos_token: put the begin-of-text token before each text, or do not; None: as the tokenizer does.
        prefix_token_id: stands before a text without context; None: the begin-of-text token, or the end-of-text token
            where there is none.
        think_end_token: only text after this one counts as an answer.
        chat_template_args: variables of the chat template, such as ``enable_thinking``.
        device: as the engine's. lm-eval's command line passes ``cuda:0`` unless it is told otherwise.
        engine_args: those of ``EngineConfig``.

    Raises:
        ValueError: an argument is not allowed, or the model has no tokenizer.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        engine: CompiledEngine | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **engine_args: Any,
    ) -> None:
        super().__init__()
        if max_batch_size is not None:
            raise ValueError(f"max_batch_size must be None: give bucket_sizes or max_num_seqs, given {max_batch_size}")
        if device is not None:
            engine_args["device"] = device
        if engine is not None and (pretrained is not None or engine_args):
            raise ValueError(f"engine must be None with pretrained or engine arguments, given {sorted(engine_args)}")
        self.engine = CompiledEngine(pretrained, **engine_args) if engine is None else engine
        self.tokenizer = self.engine.get_tokenizer()
        self.max_length = self.engine.scheduler.request_capacity
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token
        self.think_end_token, self.chat_template_args = think_end_token, chat_template_args or {}
        self._prefix_token_id = prefix_token_id

    # -- Tokens

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        known = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((token_id for token_id in known if token_id is not None), None)
        if found is None:
            raise ValueError("the tokenizer has no token to put before a text without context: give prefix_token_id")
        return found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """As lm-eval's ``hf``: a text that begins with the prefix token, as a rendered chat may, gets no second one."""
        if add_special_tokens is None:
            begins = has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = False if begins else self.add_bos_token
        if add_special_tokens is not None:
            options["add_special_tokens"] = add_special_tokens
        return self.tokenizer.encode(string, **options)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )

    # -- What lm-eval asks

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy decoding would give it.

        A context that is too long loses its first tokens. The last token of all is not computed, and needs no room.
        """
        contexts = [cut_context(context, continuation, self.max_length + 1) for _, context, continuation in requests]
        num_cut = sum(len(cut) < len(context) for cut, (_, context, _) in zip(contexts, requests, strict=True))
        if num_cut:
            logger.warning(f"{num_cut} contexts are cut at the left to fit into {self.max_length} tokens")
        found = []
        for part in _parts(list(zip(contexts, requests, strict=True)), self.engine.config.max_queued_requests):
            continuations = [continuation for _, (_, _, continuation) in part]
            scores = self.engine.score(
                [context for context, _ in part], continuations, use_tqdm=not disable_tqdm, raise_on_error=True
            )
            for score, (_, (key, _, _)) in zip(scores, part, strict=True):
                if score.error is not None or score.cumulative_logprob is None:
                    raise RuntimeError(f"a request of lm-eval could not be scored: {score.error}")
                found.append((score.cumulative_logprob, score.is_greedy))
                if key is not None:  # windows of a long text have none
                    self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows that do not overlap; the prefix token is before the first."""
        windows: list[list[Pair]] = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows.append([(None, *make_disjoint_window(pair)) for pair in pairs])
        scores = iter(self._loglikelihood_tokens(list(itertools.chain(*windows)), disable_tqdm))
        totals = [sum(next(scores)[0] for _ in own) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A text for each context, which ends before the first of its stops."""
        end_of_text = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        prompts, params, stops = [], [], []
        for request in requests:
            context, options = request.args
            options = dict(normalize_gen_kwargs(options, self.max_gen_toks))
            until = handle_stop_sequences(options.pop("until", None), eos=end_of_text)
            max_tokens = options.pop("max_gen_toks")
            if max_tokens >= self.max_length:
                raise ValueError(
                    f"max_gen_toks must be below {self.max_length}, the model's length, given {max_tokens}"
                )
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            tokens, max_tokens = maybe_truncate(tokens, max_tokens, self.max_length)
            # What ends an answer may be part of the thoughts before it.
            own = [end_of_text] if self.think_end_token else until
            prompts.append(tokens)
            params.append(sampling_params(options, own, max_tokens))
            stops.append(until)
        texts = []
        work = list(zip(prompts, params, requests, stops, strict=True))
        for part in _parts(work, self.engine.config.max_queued_requests):
            outputs = self.engine.generate(
                [row[0] for row in part], [row[1] for row in part], use_tqdm=not disable_tqdm, raise_on_error=True
            )
            for output, (_, _, request, until) in zip(outputs, part, strict=True):
                completion = output.outputs[0]
                if completion.finish_reason not in ("stop", "length"):
                    raise RuntimeError(f"a request of lm-eval could not be served: {completion.stop_reason}")
                texts.append(postprocess_generated_text(completion.text, until, self.think_end_token))
                self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
