"""Names of arguments: an unknown one is refused with the nearest known one, or with what this engine has instead.

People who come from vLLM or transformers type their names. Such a name is never taken as if it were ours, since a value
may mean something else here (bytes, not GiB); the refusal says what to give.
"""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Class = TypeVar("Class")

_ONE_DEVICE = "there is none: an engine runs on one device"
_BUCKETS = "give bucket_sizes (requests of a decode step) and token_bucket_sizes (tokens of a step with prompts)"
_NO_QUANTISED_WEIGHTS = "there is none: weights are float32, bfloat16 or float16. kv_cache_dtype quantises the KV cache"
_NO_LORA = "there is none: merge the adapter into the checkpoint"
_TEXT_ONLY = "there is none: the engine serves text"
_STRUCTURED = "give structured_outputs={'json': ...}, 'regex', 'choice' or 'grammar'"
_BEAMS = "call engine.beam_search(prompts, beam_width=...)"
_OWN_LOGITS = "there is none; a LogitsTransform can do it: the engine's logits_transforms, and the request's"

# Engine argument of vLLM -> what to do here.
ENGINE_ARGUMENTS: Mapping[str, str] = {
    "swap_space": "give swap_space_bytes, in bytes, not GiB",
    "num_gpu_blocks_override": "give num_kv_blocks",
    "kv_cache_memory": "give kv_cache_memory_bytes",
    "cpu_offload_gb": "there is none: weights stay on the device",
    "cudagraph_capture_sizes": _BUCKETS,
    "cuda_graph_sizes": _BUCKETS,
    "max_seq_len_to_capture": _BUCKETS,
    "max_cudagraph_capture_size": _BUCKETS,
    "max_context_len_to_capture": _BUCKETS,
    "compilation_config": f"{_BUCKETS} and cuda_graphs",
    "optimization_level": "there is none: everything is compiled, unless enforce_eager=True",
    "logits_processors": "give logits_transforms, which are compiled into the step",
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "enable_expert_parallel": _ONE_DEVICE,
    "distributed_executor_backend": _ONE_DEVICE,
    "quantization": _NO_QUANTISED_WEIGHTS,
    "quantization_config": _NO_QUANTISED_WEIGHTS,
    "load_in_4bit": _NO_QUANTISED_WEIGHTS,
    "load_in_8bit": _NO_QUANTISED_WEIGHTS,
    "calculate_kv_scales": "there is none: each token and KV head has a scale of its own",
    "torch_dtype": "give dtype",
    "device_map": "give device",
    "trust_remote_code": "there is none: code of a checkpoint is never run",
    "code_revision": "there is none: code of a checkpoint is never run",
    "tokenizer_mode": "there is none: the tokenizer is read from tokenizer.json",
    "skip_tokenizer_init": "there is none: give prompt_token_ids and SamplingParams(detokenize=False)",
    "hf_token": "set the environment variable HF_TOKEN",
    "token": "set the environment variable HF_TOKEN",
    "download_dir": "set the environment variable HF_HOME",
    "cache_dir": "set the environment variable HF_HOME",
    "hf_overrides": "there is none: the model is what its config.json says",
    "hf_config_path": "there is none: the model is what its config.json says",
    "generation_config": "there is none: chat() follows generation_config.json unless it is given sampling_params",
    "override_generation_config": "give sampling_params to chat() and generate()",
    "chat_template": "give chat_template to chat()",
    "served_model_name": "there is none: the engine is no server",
    "guided_decoding_backend": "there is none: llguidance serves SamplingParams(structured_outputs=...)",
    "structured_outputs_config": "there is none: llguidance serves SamplingParams(structured_outputs=...)",
    "speculative_config": "there is none: tokens are not speculated on",
    "speculative_model": "there is none: tokens are not speculated on",
    "num_speculative_tokens": "there is none: tokens are not speculated on",
    "enable_lora": _NO_LORA,
    "lora_modules": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "task": "there is none: the engine generates text",
    "runner": "there is none: the engine generates text",
    "max_num_partial_prefills": "give max_num_batched_tokens or target_itl_ms, which bound a step",
    "num_scheduler_steps": "there is none: every step is scheduled; async_scheduling hides the time it takes",
    "disable_log_stats": "there is none: nothing is logged; stats() and report() tell",
    "attention_backend": "there is none: each device has one attention kernel",
    "enable_sleep_mode": "there is none: close() frees the memory",
    "disable_sliding_window": "there is none: models with a sliding window are refused",
}

# Sampling parameter of vLLM or transformers -> what to do here.
SAMPLING_PARAMETERS: Mapping[str, str] = {
    "best_of": "there is none: give n and logprobs, and choose by cumulative_logprob",
    "use_beam_search": _BEAMS,
    "num_beams": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "logits_processors": "give logits_transforms: names of the engine's logits_transforms, with their arguments",
    "guided_decoding": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "response_format": _STRUCTURED,
    "max_new_tokens": "give max_tokens",
    "max_completion_tokens": "give max_tokens",
    "max_length": "give max_tokens, which does not count the prompt",
    "min_new_tokens": "give min_tokens",
    "do_sample": "give temperature: 0 is greedy",
    "num_return_sequences": "give n",
    "top_logprobs": "give logprobs",
    "stop_strings": "give stop",
    "stop_sequences": "give stop",
    "eos_token_id": "give stop_token_ids",
    "bad_words_ids": "give bad_words",
    "suppress_tokens": "give logit_bias",
    "no_repeat_ngram_size": _OWN_LOGITS,
    "typical_p": _OWN_LOGITS,
    "top_a": _OWN_LOGITS,
    "extra_args": "give logits_transforms",
    "echo": "there is none: an output has its prompt",
    "stream": "call engine.stream(prompt)",
    "spaces_between_special_tokens": "there is none: the text is what the tokenizer decodes",
    "flat_logprobs": "there is none: logprobs are dicts by token id",
    "priority": "give it to generate() or add_request()",
    "lora_request": _NO_LORA,
    "cache_salt": 'give it with the prompt: {"prompt": ..., "cache_salt": ...}',
    "enable_thinking": "give chat(..., chat_template_kwargs={'enable_thinking': ...})",
}

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
    "load_format": dict.fromkeys(
        ("pt", "bin", "npcache", "gguf", "bitsandbytes", "mistral", "hf", "tensorizer", "runai_streamer"),
        "there is none: only safetensors files are read, since others can hold code",
    ),
}


def name_hint(name: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """What to give instead of ``name``, which is none of ``known``; empty where nobody can tell.

    Args:
        elsewhere: names that other libraries have for these -> what to do here.
    """
    if name in elsewhere:
        return f"a name of other libraries; {elsewhere[name]}"
    nearest = difflib.get_close_matches(name, known, 1)
    return f"did you mean {nearest[0]!r}?" if nearest else ""


def value_hint(name: str, value: Any) -> str:
    """What to add to the refusal of a value that vLLM knows; empty where it does not."""
    hint = VALUES.get(name, {}).get(str(value).lower())
    return "" if hint is None else f": {hint}"


def refuse_unknown_names(kind: str, elsewhere: Mapping[str, str]) -> Callable[[type[Class]], type[Class]]:
    """For a dataclass: its constructor refuses a name that is no field with a ``ValueError`` that says what to give.

    Args:
        kind: what a field of the class is, such as "engine argument".
        elsewhere: as in ``name_hint``.
    """

    def decorate(cls: type[Class]) -> type[Class]:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        init = cls.__init__

        @functools.wraps(init)
        def checked_init(self: Any, *args: Any, **arguments: Any) -> None:
            for name in arguments:
                if name not in known:
                    hint = name_hint(name, known, elsewhere)
                    raise ValueError(f"unknown {kind} {name!r}{hint and ': ' + hint}; allowed: {', '.join(known)}")
            init(self, *args, **arguments)

        cls.__init__ = checked_init  # type: ignore[method-assign]
        return cls

    return decorate
