"""Names of arguments: an unknown one is refused with the nearest known one, or with what this engine has instead.

People who come from vLLM or transformers type their names. Such a name is never taken as if it were ours, since a value
may mean something else here (bytes, not GiB); the refusal names what to give.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from compiled_llm.api.nearest import nearest
from compiled_llm.api.readable import readable_repr

Class = TypeVar("Class")


def _by_name(names_of: Mapping[str, str]) -> dict[str, str]:
    """What to do -> the names that it is for, with spaces between. Turned round."""
    return {name: answer for answer, names in names_of.items() for name in names.split()}


# Engine argument of vLLM or transformers -> what to do here.
ENGINE_ARGUMENTS: Mapping[str, str] = _by_name(
    {
        "give swap_space_bytes, in bytes, not GiB": "swap_space",
        "give num_kv_blocks": "num_gpu_blocks_override",
        "give kv_cache_memory_bytes": "kv_cache_memory",
        "there is none: weights stay on the device": "cpu_offload_gb",
        "give bucket_sizes (requests of a decode step) and token_bucket_sizes (tokens of a step with prompts)": (
            "cudagraph_capture_sizes cuda_graph_sizes max_seq_len_to_capture max_cudagraph_capture_size "
            "max_context_len_to_capture"
        ),
        "give bucket_sizes, token_bucket_sizes and cuda_graphs": "compilation_config",
        "there is none: everything is compiled, unless enforce_eager=True": "optimization_level",
        "give logits_transforms, which are compiled into the step": "logits_processors",
        "give exact=True": "enable_deterministic_inference batch_invariant",
        "there is none: an engine runs on one device": (
            "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel "
            "distributed_executor_backend"
        ),
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
        "give drafter, an object that proposes tokens": "speculative_config speculative_model num_speculative_tokens",
        "there is none: merge the adapter into the checkpoint": "enable_lora lora_modules max_loras max_lora_rank",
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
        "give it to generate() or add_request()": "priority",
        "there is none: merge the adapter into the checkpoint": "lora_request",
        'give it with the prompt: {"prompt": ..., "cache_salt": ...}': "cache_salt",
        "give chat(..., chat_template_kwargs={'enable_thinking': ...})": "enable_thinking",
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
    "model_impl": {"vllm": "give 'native'", "terratorch": "there is none"},
    "load_format": dict.fromkeys(
        ("pt", "bin", "npcache", "gguf", "bitsandbytes", "mistral", "hf", "tensorizer", "runai_streamer"),
        "there is none: only safetensors files are read, since others can hold code",
    ),
}


def name_hint(name: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """What to give instead of ``name``, which is none of ``known``; empty where there is none.

    Args:
        elsewhere: names that other libraries have for these -> what to do here.
    """
    if name in elsewhere:
        return f"a name of other libraries; {elsewhere[name]}"
    return did_you_mean(name, known)


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
