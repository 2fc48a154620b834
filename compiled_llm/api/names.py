"""Names of arguments: an unknown one is refused with the nearest known one, or with what this engine has instead.

People who come from vLLM or transformers type their names. Such a name is never taken as if it were ours, since a value
may mean something else here (bytes, not GiB); the refusal names what to give.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from compiled_llm.api.readable import readable_repr

Class = TypeVar("Class")


def _by_name(names_of: Mapping[str, str]) -> dict[str, str]:
    """What to do -> the names that it is for, with spaces between. Turned round."""
    return {name: answer for answer, names in names_of.items() for name in names.split()}


QUANTIZATIONS = ("int8", "int8_w8a8", "int4", "int4_w4a8", "fp8", "mxfp4")  # of weights

# Engine argument of vLLM or transformers -> what to do here.
ENGINE_ARGUMENTS: Mapping[str, str] = _by_name(
    {
        "give swap_space_bytes, in bytes, not GiB": "swap_space",
        "give num_kv_blocks": "num_gpu_blocks_override",
        "give kv_cache_memory_bytes": "kv_cache_memory",
        "give kv_host_bytes and kv_disk_path": "kv_offloading_size kv_offloading_backend",
        "give role and kv_transfer_address": "kv_transfer_config kv_connector kv_role",
        "give bucket_sizes (requests of a decode step) and token_bucket_sizes (tokens of a step with prompts)": (
            "cudagraph_capture_sizes cuda_graph_sizes max_seq_len_to_capture max_cudagraph_capture_size "
            "max_context_len_to_capture"
        ),
        "give bucket_sizes, token_bucket_sizes and cuda_graphs": "compilation_config",
        "there is none: everything is compiled, unless enforce_eager=True": "optimization_level",
        "give logits_transforms, which are compiled into the step": "logits_processors",
        "give exact=True": "enable_deterministic_inference batch_invariant",
        "there is none: give tensor_parallel_size": "distributed_executor_backend",
        "give it to compiled-llm serve, or --workers to compiled-llm batch": "data_parallel_size",
        "give quantization, or a checkpoint that is quantised": "quantization_config load_in_4bit load_in_8bit",
        "there is none: each token and KV head has a scale of its own": "calculate_kv_scales",
        "give dtype": "torch_dtype",
        "give device": "device_map",
        "there is none: code of a checkpoint is never run": "trust_remote_code code_revision",
        "there is none: the tokenizer is read from tokenizer.json": "tokenizer_mode",
        "there is none: give prompt_token_ids and SamplingParams(detokenize=False)": "skip_tokenizer_init",
        "set the environment variable HF_TOKEN": "hf_token token",
        "set the environment variable HF_HOME": "download_dir cache_dir",
        "there is none: the model is what its config.json says": "hf_overrides hf_config_path",
        "there is none: chat() follows generation_config.json unless it is given sampling_params": "generation_config",
        "give sampling_params to chat() and generate()": "override_generation_config",
        "give chat_template to chat()": "chat_template",
        "there is none: the engine is no server": "served_model_name",
        "there is none: llguidance serves SamplingParams(structured_outputs=...)": (
            "guided_decoding_backend structured_outputs_config"
        ),
        "give speculative_config, a dict with method and num_speculative_tokens": (
            "speculative_model num_speculative_tokens speculative_method"
        ),
        "give lora_request to generate(), chat() and the others": "lora_modules",
        "there is none: adapters are kept in the dtype of the model": "lora_dtype",
        "there is none: an engine runs on one device, with all of an adapter": "fully_sharded_loras",
        "there is none: the engine serves text": "limit_mm_per_prompt mm_processor_kwargs",
        "there is none: the engine generates text": "task runner",
        "give max_num_batched_tokens or target_itl_ms, which bound a step": "max_num_partial_prefills",
        "there is none: every step is scheduled; async_scheduling hides the time it takes": "num_scheduler_steps",
        "there is none: nothing is logged; stats() and report() tell": "disable_log_stats",
        "there is none: each device has one attention kernel": "attention_backend",
        "there is none: close() frees the memory": "enable_sleep_mode",
        "there is none: sliding windows are part of a model": "disable_sliding_window",
    }
)

# Sampling parameter of vLLM or transformers -> what to do here.
SAMPLING_PARAMETERS: Mapping[str, str] = _by_name(
    {
        "there is none: give n and logprobs, and choose by cumulative_logprob": "best_of",
        "call engine.beam_search(prompts, beam_width=...)": (
            "use_beam_search num_beams beam_width length_penalty early_stopping"
        ),
        "give logits_transforms: names of the engine's logits_transforms, with their arguments": "logits_processors",
        "give structured_outputs={'json': ...}, 'regex', 'choice' or 'grammar'": (
            "guided_decoding guided_json guided_regex guided_choice guided_grammar response_format"
        ),
        "give num_speculative_tokens, and the engine argument speculative_config": (
            "prompt_lookup_num_tokens num_assistant_tokens assistant_model speculative_config speculative"
        ),
        "give max_tokens": "max_new_tokens max_completion_tokens",
        "give max_tokens, which does not count the prompt": "max_length",
        "give min_tokens": "min_new_tokens",
        "give temperature: 0 is greedy": "do_sample",
        "give n": "num_return_sequences",
        "give logprobs": "top_logprobs",
        "give stop": "stop_strings stop_sequences",
        "give stop_token_ids": "eos_token_id",
        "give bad_words": "bad_words_ids",
        "give logit_bias": "suppress_tokens",
        "there is none; a LogitsTransform can do it: the engine's logits_transforms, and the request's": (
            "no_repeat_ngram_size typical_p top_a"
        ),
        "give logits_transforms": "extra_args",
        "there is none: an output has its prompt": "echo",
        "call engine.stream(prompt)": "stream",
        "there is none: the text is what the tokenizer decodes": "spaces_between_special_tokens",
        "there is none: logprobs are dicts by token id": "flat_logprobs",
        "give it to generate() or add_request()": "priority lora_request",
        'give it with the prompt: {"prompt": ..., "cache_salt": ...}': "cache_salt",
        "give chat(..., chat_template_kwargs={'enable_thinking': ...})": "enable_thinking",
    }
)

# Field of vLLM's speculative_config -> what to do here.
SPECULATIVE_FIELDS: Mapping[str, str] = _by_name(
    {
        "there is none: how many are drafted follows from measured acceptance and times of steps": (
            "num_speculative_tokens_per_batch_size disable_by_batch_size speculative_disable_by_batch_size"
        ),
        "there is none: a draft counts where it is the token that is sampled there": (
            "rejection_sample_method draft_sample_method posterior_threshold posterior_alpha acceptance_method"
        ),
        "give adaptive": "enable_adaptive_verification",
        "there is none: networks that draft are not shared out": "draft_tensor_parallel_size",
        "give num_speculative_tokens": "num_tokens k",
    }
)

_FLOATS = {
    **dict.fromkeys(("half", "fp16", "f16", "torch.float16", "torch.half"), "give 'float16'"),
    **dict.fromkeys(("bf16", "torch.bfloat16"), "give 'bfloat16'"),
    **dict.fromkeys(("float", "fp32", "f32", "single", "torch.float32", "torch.float"), "give 'float32'"),
}
# Engine argument -> its value in vLLM -> what to give here.
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": _FLOATS,
    "kv_cache_dtype": {
        **_FLOATS,
        **dict.fromkeys(
            ("fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn", "torch.float8_e4m3fn"), "give 'fp8', which is e4m3"
        ),
        **dict.fromkeys(("fp8_e5m2", "fp8_inc", "fp8_ds_mla"), "there is none: give 'fp8', which is e4m3"),
    },
    "device": {"gpu": "give 'cuda'"},
    "quantization": {
        **dict.fromkeys(
            ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "torchao", "auto-round"),
            "leave it out: such a checkpoint says so itself",
        ),
        "bitsandbytes": "give 'int8' or 'int4'",
        **dict.fromkeys(("w8a8", "experts_int8", "int8_wo"), "give 'int8_w8a8' or 'int8'"),
    },
    "method": {
        "ngram_gpu": "give 'ngram'",
        "[ngram]": "give 'ngram'",
        "custom_class": "give the engine argument drafter",
    },
    "model_impl": {"vllm": "give 'native'", "terratorch": "there is none"},
    "load_format": dict.fromkeys(
        ("pt", "bin", "npcache", "gguf", "bitsandbytes", "mistral", "hf", "tensorizer", "runai_streamer"),
        "there is none: only safetensors files are read, since others can hold code",
    ),
}


def name_hint(name: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """What to give instead of ``name``, which is none of ``known``; empty where there is none.

    Args:
        elsewhere: names that other libraries have for such arguments -> what to do here.
    """
    if name in elsewhere:
        return f"a name of other libraries; {elsewhere[name]}"
    return did_you_mean(name, known)


def refuse_unknown_fields(body: Iterable[str], known: Sequence[str], elsewhere: Mapping[str, str]) -> None:
    """``ValueError`` for a field of a request's body that is none of ``known``, as ``name_hint``."""
    for name in body:
        if name not in known:
            raise ValueError(f"{name:.100} is not served: {name_hint(name, known, elsewhere) or 'leave it out'}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'a' or 'b'?``, the nearest first; empty where nothing is near."""
    found = [repr(one) for one in nearest(name, known)]
    return f"did you mean {' or '.join(found)}?" if found else ""


def value_hint(name: str, value: Any) -> str:
    """What to add to the refusal of a value of vLLM; empty where it has no such value."""
    hint = VALUES.get(name, {}).get(str(value).lower())
    return "" if hint is None else f": {hint}"


def refuse_unknown_names(kind: str, elsewhere: Mapping[str, str]) -> Callable[[type[Class]], type[Class]]:
    """For a dataclass of arguments: its constructor refuses a name that is no field, with a ``ValueError`` that names
    what to give; and its ``repr`` shows the arguments that are not as by default.

    Args:
        kind: what a field of the class is, such as "engine argument".
        elsewhere: as in ``name_hint``.
    """

    def decorate(cls: type[Class]) -> type[Class]:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        init = cls.__init__

        @functools.wraps(init)
        def checked_init(self: Any, /, *args: Any, **arguments: Any) -> None:
            for name in arguments:
                if name not in known:
                    hint = name_hint(name, known, elsewhere)
                    raise ValueError(f"unknown {kind} {name!r}{hint and ': ' + hint}; allowed: {', '.join(known)}")
            init(self, *args, **arguments)

        cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
        cls.__repr__ = readable_repr  # type: ignore[method-assign]
        return cls

    return decorate


# -- The nearest known name


_FARTHEST = 0.45  # above it, two names have nothing to do with each other
_AS_LIKELY = 0.12  # names that are so much farther than the nearest one are offered with it
_MOST = 3
_LONGEST = 64  # characters; what is longer is no name
_SWAP = 0.5  # two letters in the other order: the most common slip, so less than a wrong letter
_WORD_LEFT_OUT = 0.5  # of a name of several words, against 1 for another word
_CUT_OFF, _CUT_LETTER, _CUT_LEAST = 0.1, 0.02, 3  # a word's beginning of at least three letters, and what it lacks


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names of ``known`` that ``name`` may stand for, at most three, best first; none where nothing is near.

    Names are compared word by word (``bucket_size`` is near to ``token_bucket_sizes``, too) and without their
    separators (``topk``). A single letter is near to nothing.
    """
    if len(name) < 2:
        return []
    name = name[:_LONGEST]
    distances = sorted((_distance(name, other), place, other) for place, other in enumerate(dict.fromkeys(known)))
    close = [(distance, other) for distance, _, other in distances if distance <= _FARTHEST]
    return [other for distance, other in close if distance <= close[0][0] + _AS_LIKELY][:_MOST]


def _distance(given: str, known: str) -> float:
    """0 for equal letters, about 1 where nothing agrees."""
    one, other = _words(given), _words(known)
    if not one or not other:
        return 1.0
    return min(_of_words(one, other) / max(len(one), len(other)), _of_letters("".join(one), "".join(other)))


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]


def _of_words(one: Sequence[str], other: Sequence[str]) -> float:
    """Least sum of changes that make one list of words the other: a word left out, or changed in some letters."""

    @cache
    def of(left: int, right: int) -> float:
        if not left or not right:
            return _WORD_LEFT_OUT * (left + right)
        changed = of(left - 1, right - 1) + _of_letters(one[left - 1], other[right - 1])
        return min(changed, of(left - 1, right) + _WORD_LEFT_OUT, of(left, right - 1) + _WORD_LEFT_OUT)

    return of(len(one), len(other))


@cache
def _of_letters(one: str, other: str) -> float:
    """Letters that are wrong, missing or too many, and half of each swap, as a share of the longer word: 0 to 1.

    Less for a beginning of the other word, such as ``temp``.
    """
    one, other = sorted((one, other), key=len)
    if _CUT_LEAST <= len(one) < len(other) and other.startswith(one):
        return _CUT_OFF + _CUT_LETTER * (len(other) - len(one))
    rows = [[float(place) for place in range(len(other) + 1)]]
    for i, letter in enumerate(one, 1):
        row = [float(i)]
        for j, against in enumerate(other, 1):
            least = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != against))
            if i > 1 and j > 1 and (letter, one[i - 2]) == (other[j - 2], against):
                least = min(least, rows[-2][j - 2] + _SWAP)
            row.append(least)
        rows.append(row)
    return rows[-1][-1] / max(len(one), len(other))
