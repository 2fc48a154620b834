"""Which values of the engine's arguments go together. ``config.py`` checks each by itself, and calls this."""

from typing import Any

from compiled_llm.api.speculative_config import NETWORK_METHODS

QUANTISED_DTYPES = ("int8", "fp8")  # of the KV cache


def check_pairs(config: Any) -> None:
    """``ValueError`` unless arguments that depend on each other agree."""
    if config.cuda_graphs != "auto" and config.enforce_eager:
        given = f"(no graph is made), given {config.cuda_graphs!r}"
        raise ValueError(f"cuda_graphs must be 'auto', the default, with enforce_eager=True {given}")
    if config.weights_path is not None and (not isinstance(config.weights_path, str) or not config.weights_path):
        raise ValueError(f"weights_path must be a directory as a non-empty str, given {config.weights_path!r}")
    if config.weights_path is not None and config.load_format == "dummy":
        raise ValueError(
            "weights_path must be None with load_format='dummy' (such weights are made, and lie in no file), given "
            f"{config.weights_path!r}"
        )
    if config.keep_weights_twice and config.compress_weights is not None:
        raise ValueError(
            "compress_weights must be None with keep_weights_twice (weights are kept both ways), given "
            f"{config.compress_weights!r}"
        )
    if config.keep_weights_twice and config.weights_path is not None:
        raise ValueError(
            "weights_path must be None with keep_weights_twice (whole layers are read ahead of a step, which takes one "
            f"of both), given {config.weights_path!r}"
        )
    if config.weights_path is None and config.weights_bytes is not None:
        raise ValueError(f"weights_bytes must be None without weights_path, given {config.weights_bytes}")
    if config.cpu_offload_gb:
        _check_offload(config)
    if config.preemption_mode == "swap" and config.swap_space_bytes == 0:
        raise ValueError("preemption_mode='swap' needs swap_space_bytes above 0, given 0")
    _check_tiers(config)
    _check_roles(config)
    if config.kv_cache_skip_layers and config.kv_cache_dtype not in QUANTISED_DTYPES:
        raise ValueError(
            "kv_cache_skip_layers must be empty unless kv_cache_dtype is 'int8' or 'fp8' (no other is quantised), "
            f"given {config.kv_cache_skip_layers!r} with kv_cache_dtype={config.kv_cache_dtype!r}"
        )
    if (
        config.cuda_graphs == "trees"
        and config.speculation is not None
        and config.speculation.method in NETWORK_METHODS
    ):
        raise ValueError(
            "cuda_graphs must not be 'trees' with a network that drafts (speculative_config), whose graphs follow "
            "any other, given 'trees'"
        )
    if config.attention_sink_tokens:
        _check_sinks(config)
    _check_lora(config)
    _check_ranks(config)
    _check_stages(config)
    if config.target_itl_ms is not None and not config.enable_chunked_prefill:
        raise ValueError(
            "target_itl_ms must be None without chunked prefill (a prompt is one step then), "
            f"given {config.target_itl_ms!r}"
        )


def _check_offload(config: Any) -> None:
    given = f"given {config.cpu_offload_gb:g}"
    reasons = {
        "programmatic": "kernels that start early ask for weights before these have come",
        "trees": "torch's CUDA graph trees take no tensors in host memory",
    }
    if (reason := reasons.get(config.cuda_graphs)) is not None:
        raise ValueError(f"cpu_offload_gb must be 0 with cuda_graphs={config.cuda_graphs!r} ({reason}), {given}")
    if config.num_processes > 1 or config.tensor_parallel_exact:
        raise ValueError(
            "cpu_offload_gb must be 0 with ranks and stages (tensor_parallel_size, tensor_parallel_exact, "
            f"pipeline_parallel_size), which are processes on a CPU, {given}"
        )
    if config.speculation is not None and config.speculation.method == "layer_skip":
        raise ValueError(
            "cpu_offload_gb must be 0 with the method 'layer_skip' in speculative_config (each draft would fetch "
            f"layers as a step does), {given}"
        )


def _check_tiers(config: Any) -> None:
    path = config.kv_disk_path
    if config.kv_host_bytes and not config.enable_prefix_caching:
        raise ValueError(
            "kv_host_bytes must be 0 with enable_prefix_caching=False (no block leaves a prefix cache), given "
            f"{config.kv_host_bytes}"
        )
    if path is not None and (not isinstance(path, str) or not path):
        raise ValueError(f"kv_disk_path must be a directory as a non-empty str, or None, given {path!r}")
    if path is not None and not config.kv_host_bytes:
        raise ValueError("kv_host_bytes must be above 0 with kv_disk_path (files are read into it), given 0")
    if path is None and config.kv_disk_bytes is not None:
        raise ValueError(f"kv_disk_bytes must be None without kv_disk_path, given {config.kv_disk_bytes}")


def _check_roles(config: Any) -> None:
    """What an engine that gives or takes KV blocks needs, and what it does not serve yet."""
    address = config.kv_transfer_address
    if address is not None and (not isinstance(address, str) or not address):
        raise ValueError(
            f"kv_transfer_address must be unix:PATH, HOST:PORT or nixl:HOST:PORT, or None, given {address!r}"
        )
    if config.role == "prefill" and address is None:
        raise ValueError("kv_transfer_address must be given with role='prefill' (others take its blocks there)")
    if config.kv_transfer_bytes is not None and address is None:
        given = f"given {config.kv_transfer_bytes}"
        raise ValueError(f"kv_transfer_bytes must be None without kv_transfer_address, {given}")
    if not config.transfers:
        if config.kv_transfer_peers:
            given = f"given {config.kv_transfer_peers} with role='both'"
            raise ValueError(f"kv_transfer_peers must be empty for an engine that takes no blocks, {given}")
        return
    given = f"role={config.role!r}, kv_transfer_address={address!r}"
    if not config.kv_host_bytes:
        raise ValueError(f"kv_host_bytes must be above 0 with {given} (blocks come and go by way of it), given 0")
    for name, allowed in (("kv_disk_path", None), ("model_process", False)):
        if (value := getattr(config, name)) != allowed:
            raise ValueError(f"{name} must be {allowed} with {given} (not served together yet), given {value!r}")


def _check_lora(config: Any) -> None:
    for name in ("max_loras", "max_lora_rank", "max_cpu_loras", "max_lora_modules_to_save"):
        if not config.enable_lora and getattr(config, name) is not None:
            raise ValueError(f"{name} must be None without enable_lora=True, given {getattr(config, name)}")
    if not config.enable_lora and config.lora_target_modules != ("all-linear",):
        raise ValueError(
            "lora_target_modules must be left out without enable_lora=True, given "
            f"{', '.join(config.lora_target_modules)}"
        )
    if config.whole_loras > config.lora_slots:
        raise ValueError(
            f"max_lora_modules_to_save must be at most max_loras, {config.lora_slots}, given {config.whole_loras}"
        )
    if config.whole_loras and config.tensor_parallel_size > 1:
        raise ValueError(
            "max_lora_modules_to_save must be 0 with tensor_parallel_size > 1 (ranks share out no whole matrices), "
            f"given {config.whole_loras}: merge such adapters by compiled-llm merge-lora"
        )
    if config.enable_lora and not config.lora_target_modules:
        raise ValueError("lora_target_modules must have a name with enable_lora=True, given none")
    if config.enable_lora and config.model_process:
        raise ValueError(
            "model_process must be False with enable_lora=True (adapters are read in the engine's process), given True"
        )


def _check_stages(config: Any) -> None:
    if config.pipeline_parallel_size == 1:
        return
    given, name = config.pipeline_parallel_size, "pipeline_parallel_size above 1"
    if config.tensor_parallel_size * given > 64:
        raise ValueError(
            f"pipeline_parallel_size must be at most {64 // config.tensor_parallel_size} with tensor_parallel_size="
            f"{config.tensor_parallel_size} (64 processes), given {given}"
        )
    if config.enable_lora:
        raise ValueError(f"enable_lora must be False with {name} (adapters are not shared out yet), given True")
    if config.speculation is not None and config.speculation.method in NETWORK_METHODS:
        raise ValueError(
            f"speculative_config must have a method that drafts from tokens, as 'suffix' and 'ngram', with {name} "
            f"(networks that draft are in no stage), given {config.speculation.method!r}"
        )
    for path in ("kv_disk_path", "weights_path"):
        if getattr(config, path) is not None:
            raise ValueError(
                f"{path} must be None with {name} (files there are of whole models), given {getattr(config, path)!r}"
            )
    if config.kv_host_bytes:
        raise ValueError(
            f"kv_host_bytes must be 0 with {name} (stages have no tiers yet), given {config.kv_host_bytes}"
        )
    if config.async_scheduling:
        raise ValueError(
            f"async_scheduling must be None or False with {name} (a request's next step waits for its token, while "
            "steps of others run), given True"
        )


def _check_ranks(config: Any) -> None:
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise ValueError("enable_expert_parallel must be False with tensor_parallel_size=1, given True")
    if config.tensor_parallel_size == 1 and not config.tensor_parallel_exact:
        return
    name = "tensor_parallel_size above 1" if config.tensor_parallel_size > 1 else "tensor_parallel_exact=True"
    if (given := config.weights_path) is not None:
        raise ValueError(f"weights_path must be None with {name} (files there are of whole models), given {given!r}")
    if config.tensor_parallel_exact and config.tensor_parallel_size not in (1, 2, 4, 8):
        raise ValueError(
            "tensor_parallel_size must be 1, 2, 4 or 8 with tensor_parallel_exact=True, given "
            f"{config.tensor_parallel_size}"
        )


def _check_sinks(config: Any) -> None:
    name = f"attention_sink_tokens={config.attention_sink_tokens}"
    if config.sliding_window is None:
        raise ValueError(f"sliding_window must be given with {name}: the tokens that are seen besides")
    if config.sliding_window % config.block_size:
        raise ValueError(
            f"sliding_window must be a multiple of block_size={config.block_size} with {name}, given "
            f"{config.sliding_window}"
        )
    required = {"enable_prefix_caching": False, "swap_space_bytes": 0, "enable_chunked_prefill": True}
    for field, value in required.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"{field} must be {value} with {name} (the keys of sink tokens belong to one request and move with "
                f"it), given {getattr(config, field)}"
            )
