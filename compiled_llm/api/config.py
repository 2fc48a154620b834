"""EngineConfig: every argument of the engine, validated once. EngineLimits: sizes that follow from it and the model.

No torch here: the scheduler reads the arguments too.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from compiled_llm.api.argument_checks import check_fields, integers, names, one_of, sizes
from compiled_llm.api.config_pairs import QUANTISED_DTYPES, check_pairs
from compiled_llm.api.names import ENGINE_ARGUMENTS, QUANTIZATIONS, refuse_unknown_names, value_hint
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.api.streaming import Stream

DTYPES = ("float32", "bfloat16", "float16")
GROUP_SIZES = (32, 64, 128)
# Arguments that are one of a few names -> these names. ``quantization`` may also be None.
NAMED_VALUES = {
    "dtype": ("auto", *DTYPES),
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_dtype": ("auto", *DTYPES, *QUANTISED_DTYPES),
    "quantization": QUANTIZATIONS,
    "quantization_head": ("auto", "none", *QUANTIZATIONS),
    "quantization_embedding": ("none", *QUANTIZATIONS),
    "quantization_activations": ("auto", "model", "int8"),
}
LEAST_KV_KEY = 16  # characters of the next
KV_KEY_VARIABLE = "COMPILED_LLM_KV_KEY"  # of the environment: what engines that give and take KV blocks share
MOST_IMPLIED_LEN = 2**20  # tokens that a model may have max_model_len be


@refuse_unknown_names("engine argument", ENGINE_ARGUMENTS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Arguments of the engine. Out of range: ``ValueError`` with the name, what is allowed and what was given.

    Attributes:
        model: directory, hub id or GGUF file of a checkpoint; None is the bundled demo model. For a private hub id, set
            the environment variable HF_TOKEN to an access token; HF_HOME names the directory of downloads.
        revision: branch, tag or commit of the hub's ``model``. None: its main branch.
        tokenizer: directory or hub id, if not the model's own.
        tokenizer_revision: branch, tag or commit of the hub's ``tokenizer``. None: its main branch.
        split_special_tokens: what the sampling parameter of that name is where a request does not give it.
        dtype: of weights and activations: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        device: where the model runs: "auto" (CUDA if there is one, else the CPU), "cpu", "cuda" or "cuda:<index>".
        load_format: "auto" or "safetensors"; "dummy" makes seeded random weights from config.json alone.
        model_impl: whose code computes the model: "native", a file of this engine for its family; "transformers",
            transformers' own modelling code with this engine's attention and linear layers, see docs/models.md; "auto":
            the first where there is one, else the second.
        quantization: round weights of linear layers at load: "int8" (a scale for each output), "int4" (a scale and a
            zero point for each group of inputs), "fp8" (e4m3, a scale for each output) or "mxfp4" (a power of two for
            each 32 inputs), with activations in the model's dtype; "int8_w8a8" and "int4_w4a8" round activations to
            int8 too, a group of a token's at a time, which is faster. None: the checkpoint's. See docs/quantization.md.
        quantization_group_size: inputs with one scale in "int4" and "int4_w4a8": 32, 64 or 128. None: 32.
        quantization_skip: names of layers that stay in the model's dtype, such as ``model.layers.0`` or ``down_proj``;
            ``*`` stands for anything. Routers of experts always do.
        quantization_head: with ``quantization``: how the head is rounded, which makes the logits, and the embedding
            where the two are one; "auto": in 8 bits where the layers are in 4 or in fp8, else as the layers; "none":
            not at all.
        quantization_embedding: with ``quantization``: how an embedding is rounded that is not the head as well, of
            which a step reads single rows; "none": not at all.
        quantization_activations: of layers that the checkpoint has in groups of 4 or 8 bits: "int8" rounds a group of a
            token's activations at a time, which decodes faster; "model": they stay in the model's dtype; "auto":
            "int8" for a GGUF file on a CPU, as llama.cpp does, unless the model is in float32, else "model".
        compress_weights: on a CPU: keep bfloat16 weights of linear layers in 12 bits, of which all 16 come back: a step
            reads a quarter less, and gives the same bits. None: on CPUs with AVX512-BF16 and without AMX, for models
            with more than 64 MiB of linear layers and a hidden_size of at least 64 for each thread; of Medusa heads
            the model's layers count as well. True counts as None of a draft model. See docs/quantization.md.
        keep_weights_twice: on a CPU with AMX: keep bfloat16 weights of linear layers in 16 bits and in 12. Steps of up
            to 16 tokens read the latter, longer ones the former: the fastest for both, with the same bits, for 1.75
            times the memory. Experts have 16 bits. See docs/quantization.md.
        weights_path: on a CPU: a directory that keeps the weights of linear layers as the kernels read them, from which
            they are mapped: later starts neither read nor pack them, engines share one copy, and a model may be larger
            than the memory. None: they are packed at each start, into memory. See docs/offload.md.
        weights_bytes: with ``weights_path``: most bytes of the files there; those that were not used for longest go
            first. None: half of what the disk has free, and what is there.
        cpu_offload_gb: on a GPU: GiB of weights, at least, that lie in host memory: those of whole layers, spread over
            the model, which come to two buffers on the GPU for each step. See docs/offload.md.
        max_model_len: most tokens of a request, prompt and output together. None: the model's.
        bucket_sizes: decode batch sizes to compile. The largest is the default ``max_num_seqs``. None: on a CPU 1, 8
            and 32, where steps of sizes between them compute no padding; on a GPU the powers of two from 1 to 256.
        token_bucket_sizes: sizes in tokens to compile for steps that hold prefill chunks. None: on a CPU, where one
            graph serves all, ``max_num_batched_tokens`` and six smaller ones, each half of the next; on a GPU also
            three quarters of these, down to a sixteenth: nine.
        max_num_seqs: most requests running at once. None: the largest bucket.
        max_num_batched_tokens: most tokens in a step. None: 2048, but on a CPU 512 while requests decode; the whole
            ``max_model_len`` without chunked prefill.
        block_size: tokens in a KV block.
        num_kv_blocks: the KV pool's size in blocks. None: see ``kv_cache_memory_bytes``.
        kv_cache_memory_bytes: the KV pool's size in bytes. None: see ``gpu_memory_utilization``.
        num_state_slots: slots for requests' states, in models with such layers. None: 3 x ``max_num_seqs`` + 1.
        gpu_memory_utilization: the share of the memory that the engine may use, where the KV pool's size is not given:
            on a GPU, of all its memory, weights included; on a CPU, of half the memory that is free after loading. The
            pool is never larger than ``max_num_seqs`` requests of ``max_model_len`` can use.
        kv_cache_dtype: of keys and values in the cache: "auto" (the model's), or "int8" or "fp8" (e4m3; on a GPU from
            compute capability 8.9), which keep a float32 scale for each token and KV head beside the codes.
            "compiled-llm report kv-cache" measures what they cost in quality.
        kv_cache_skip_layers: layers, counted from 0, whose cache stays in the model's dtype while the others are
            quantised.
        sliding_window: most keys that a token sees, itself included, in layers that see all or more: requests may then
            be longer than the model's own limit. None: as the model has it.
        attention_sink_tokens: with ``sliding_window``: the first tokens of a request, which each token sees besides,
            rounded up to whole blocks (StreamingLLM). Positions are those in the cache, and an eighth of the window
            leaves it at once. Needs ``enable_prefix_caching=False`` and no swap space.
        swap_space_bytes: host memory for the KV blocks of preempted requests; 0: they are computed again.
        kv_host_bytes: host memory for KV blocks that leave the prefix cache; a request that starts with their tokens
            gets them copied back instead of computing these. 0: such blocks are dropped. See docs/kv_tiers.md.
        kv_disk_path: with ``kv_host_bytes``: a directory of your own for files of KV blocks. Every block that can be
            found gets there by way of host memory, and a restarted engine finds it. Engines may share it.
        kv_disk_bytes: most bytes of these files, for each model; the least recently used are removed. None: 16 GiB.
        role: "prefill": computes prompts, and gives their KV blocks to other engines; "decode": takes them from there,
            for requests that say so; "both": serves requests alone. See docs/roles.md.
        kv_transfer_address: where this engine gives KV blocks: unix:PATH for engines of this machine, HOST:PORT, or
            nixl:HOST:PORT for RDMA (port 0: a free one). None: it gives none. Needs the environment's
            COMPILED_LLM_KV_KEY, which they share.
        kv_transfer_bytes: memory for blocks that are to be taken. None: 1 GiB.
        kv_transfer_peers: hosts besides this machine that requests may name to take blocks from.
        preemption_mode: "recompute", "swap" (recompute where that space is full), or "auto": what was faster at start.
        scheduling_policy: "fcfs", first come first served, or "priority": lower numbers first, then by arrival; a
            waiting request may preempt running ones of a higher number.
        target_itl_ms: time between two tokens of a request to aim at. While requests decode, prompts are computed in
            steps of the largest token bucket that takes no longer, as measured at the start and since, or little
            longer than the smallest one, and of four tokens for each request that decodes. None: as
            ``max_num_batched_tokens``; with ``compiled-llm serve`` 250, unless sizes of steps are given or prompts are
            not chunked.
        enable_prefix_caching: keep the KV blocks of finished requests, as long as there is room, for requests that
            start with the same tokens. A prompt's ``cache_salt`` keeps its blocks to requests of the same salt.
        enable_chunked_prefill: let a prompt's tokens spread over several steps.
        async_scheduling: prepare the next step while the device runs this one; what ends a request is then noticed one
            step late, and the surplus token dropped. None: on a GPU, not on a CPU, where host and device are one.
        cuda_graphs: who records the CUDA graphs on a GPU: "manual", the engine itself, a graph for each bucket;
            "programmatic", as "manual", with kernels that may start while the one before still runs (H100 or B200, CUDA
            12.3 or later); "pinned", as "manual", and graphs read and write memory of the host; "trees", torch's CUDA
            graph trees (reduce-overhead); "auto": "programmatic" where the GPU can, else "manual". A CPU has no CUDA
            graphs: there others than "auto" are refused.
        compile_workers: processes that compile side by side what is not kept on disk. None: one for each core, on a
            CPU if the model is deep enough that it pays; 0: the engine's own process, on a GPU at each start.
        wait_for_compile: compile before anything is served. False, on a CPU: serve uncompiled at once, compile
            meanwhile, and change over as graphs are ready, with no other token. A GPU waits all the same, and so does
            an engine with ``logits_transforms``, with ``compile_workers=0`` or with torch's caches turned off, which
            would have to compile in its own process, one with ranks, and one that measures at the start what it chooses
            by: with ``speculative_config`` that is adaptive, or ``swap_space_bytes`` and preemption_mode="auto".
        num_threads: threads that compute on a CPU, at most one for each core that this process may use. None: torch's
            number (``torch.set_num_threads``, OMP_NUM_THREADS, or one for each core of the affinity), but no more than
            the cores that a container's quota grants. Each engine of a process sets its own number before each step.
        speculative_config: let steps verify drafted tokens, which changes no output: a ``SpeculativeConfig``, or a dict
            of its fields such as ``{"method": "ngram", "num_speculative_tokens": 7}``. None: no drafts. See
            docs/speculation.md.
        enable_lora: serve requests with LoRA adapters, each with its own or none; see docs/lora.md.
        max_loras: with ``enable_lora``: most adapters of the requests that run at once. None: 8.
        max_lora_rank: with ``enable_lora``: the largest rank of an adapter; memory is set aside for ``max_loras`` of
            them. None: 16.
        lora_target_modules: with ``enable_lora``: layers that adapters may change, for which memory is set aside:
            ``all-linear`` stands for all linear layers but heads, experts and routers; these are named, as
            ``lm_head``, ``embed_tokens`` and ``experts``, by any part of their names between dots.
        max_cpu_loras: with ``enable_lora``: most adapters that stay in host memory while no request uses them. None: as
            ``max_loras``.
        max_lora_modules_to_save: with ``enable_lora``: most adapters that run at once with a head or an embedding of
            their own (PEFT's ``modules_to_save``). Memory is set aside for as many of both, in the model's dtype. None:
            0, such adapters are refused.
        max_logprobs: most likely tokens whose log-probabilities a request may ask for.
        max_queued_requests: most unfinished requests, waiting or running; beyond, a request is refused.
        max_request_id_length: most characters of a ``request_id``.
        max_grammar_seconds: seconds of processor time that compiling the grammar of a request may take.
        max_grammar_bytes: bytes of memory that a compiled grammar may take.
        logits_transforms: your own changes of logits, compiled into the step: ``LogitsTransform`` objects, or
            "module:name" of a class or object, for requests that ask for them by name.
        exact: require that a request's numbers are the same to the bit in any company, bucket and chunking. On a CPU
            with the C++ kernels they are without it. On a GPU it selects linear layers and attention with one order
            of operations, which take longer. Refused by name where it cannot hold.
        model_process: run the model in a process of its own, so that the scheduler and detokenising have the engine's
            process to themselves. It is started by "spawn": a script that makes such an engine needs
            ``if __name__ == "__main__":``.
        tensor_parallel_size: processes, called ranks, that run the model together: each has a part of every layer's
            weights and of the KV cache, and cores or a GPU of its own. They are started as that of ``model_process``.
            Sizes in bytes and ``num_threads`` are those of a rank. Never run on GPUs yet. See docs/parallel.md.
        tensor_parallel_exact: add the parts of a layer's sums in one order whatever ``tensor_parallel_size`` is, so
            that 1, 2, 4 and 8 ranks give the same bits.
        pipeline_parallel_size: stages, which have whole layers that follow one another, each a process on a CPU, or
            ``tensor_parallel_size`` processes. On NUMA nodes of their own they run steps of different requests at once;
            on one node they take turns with all its cores. See docs/parallel.md.
        enable_expert_parallel: with ``tensor_parallel_size`` above 1: a rank has some experts of a mixture whole, and
            not a part of each.
        enforce_eager: run the same functions without compiling, for debugging.
        progress: what a start shows on stderr: "bar", a progress bar for each stage; "lines", a line or two for each
            stage that takes long; "off", nothing; "auto": a bar on a terminal, else lines.
        seed: random seed of dummy weights, and of requests that bring none of their own.
        check_invariants: verify the scheduler's and the KV pool's invariants after every step.
    """

    model: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    split_special_tokens: bool = False
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    quantization: str | None = None
    quantization_group_size: int | None = None
    quantization_skip: tuple[str, ...] = ()
    quantization_head: str = "auto"
    quantization_embedding: str = "none"
    quantization_activations: str = "auto"
    compress_weights: bool | None = None
    keep_weights_twice: bool = False
    weights_path: str | None = None
    weights_bytes: int | None = None
    cpu_offload_gb: float = 0.0
    max_model_len: int | None = None
    bucket_sizes: tuple[int, ...] | None = None
    token_bucket_sizes: tuple[int, ...] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_state_slots: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    kv_cache_skip_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    attention_sink_tokens: int = 0
    swap_space_bytes: int = 0
    kv_host_bytes: int = 0
    kv_disk_path: str | None = None
    kv_disk_bytes: int | None = None
    role: Literal["both", "prefill", "decode"] = "both"
    kv_transfer_address: str | None = None
    kv_transfer_bytes: int | None = None
    kv_transfer_peers: tuple[str, ...] = ()
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    target_itl_ms: float | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None
    cuda_graphs: Literal["auto", "manual", "programmatic", "pinned", "trees"] = "auto"
    compile_workers: int | None = None
    wait_for_compile: bool = True
    num_threads: int | None = None
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None
    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int | None = None
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    max_cpu_loras: int | None = None
    max_lora_modules_to_save: int | None = None
    max_logprobs: int = 20
    max_queued_requests: int = 100_000
    max_request_id_length: int = 256
    max_grammar_seconds: float = 3.0
    max_grammar_bytes: int = 2**29
    logits_transforms: tuple[Any, ...] = ()
    exact: bool = False
    model_process: bool = False
    tensor_parallel_size: int = 1
    tensor_parallel_exact: bool = False
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enforce_eager: bool = False
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    seed: int = 0
    check_invariants: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _INTEGERS, {"max_grammar_seconds": (0.01, 3600), "cpu_offload_gb": (0, 4096)})
        for name, allowed in NAMED_VALUES.items():
            if name != "quantization" or self.quantization is not None:
                one_of(name, getattr(self, name), allowed)
        self._check_sources()
        self._check_quantization()
        if not isinstance(self.device, str) or self.device.split(":")[0] not in ("auto", "cpu", "cuda"):
            raise ValueError(
                "device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', "
                f"given {self.device!r}{value_hint('device', self.device)}"
            )
        for name in ("bucket_sizes", "token_bucket_sizes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, sizes(name, getattr(self, name)))
        skipped = integers("kv_cache_skip_layers", self.kv_cache_skip_layers, 0, 1023)
        object.__setattr__(self, "kv_cache_skip_layers", skipped)
        if isinstance(self.logits_transforms, str) or not isinstance(self.logits_transforms, Iterable):
            raise ValueError(f"logits_transforms must be a list, given {self.logits_transforms!r}")
        object.__setattr__(self, "logits_transforms", tuple(self.logits_transforms))
        share, target = self.gpu_memory_utilization, self.target_itl_ms
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be a number above 0 and up to 1, given {share!r}")
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | float) or not target > 0):
            raise ValueError(f"target_itl_ms must be a number of milliseconds above 0, or None, given {target!r}")
        for name in ("async_scheduling", "compress_weights"):
            if not isinstance(given := getattr(self, name), bool | None):
                raise ValueError(f"{name} must be True, False or None, given {given!r}")
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        check_pairs(self)

    def _check_sources(self) -> None:
        """Where model and tokenizer come from."""
        for of, name in (("model", "revision"), ("tokenizer", "tokenizer_revision")):
            for field, what in ((of, "a directory or a hub id"), (name, "a branch, tag or commit")):
                value = getattr(self, field)
                if value is not None and (not isinstance(value, str) or not value):
                    raise ValueError(f"{field} must be {what} as a non-empty str, given {value!r}")
            if value is not None and getattr(self, of) is None:
                raise ValueError(f"{name} must be None without {of}, the hub id that it belongs to, given {value!r}")

    def _check_quantization(self) -> None:
        """How weights are rounded."""
        for name in ("quantization_skip", "lora_target_modules", "kv_transfer_peers"):
            object.__setattr__(self, name, names(name, getattr(self, name)))
        size, head = self.quantization_group_size, self.quantization_head
        if size is not None and size not in GROUP_SIZES:
            raise ValueError(f"quantization_group_size must be one of {GROUP_SIZES} or None, given {size!r}")
        of_weights = (self.quantization, head, self.quantization_embedding)
        if size is not None and not any(str(name).startswith("int4") for name in of_weights):
            raise ValueError(
                "quantization_group_size must be None unless weights are quantised to 'int4' or 'int4_w4a8' (the "
                f"groups of others are given), given {size} with quantization={self.quantization!r}"
            )
        alone = {"quantization_skip": (), "quantization_head": "auto", "quantization_embedding": "none"}
        for name, default in alone.items():
            if self.quantization is None and getattr(self, name) != default:
                raise ValueError(f"{name} must be {default!r} without quantization, given {getattr(self, name)!r}")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config``, once it is no dict any more."""
        assert not isinstance(self.speculative_config, dict)
        return self.speculative_config

    @property
    def num_processes(self) -> int:
        """Ranks of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def transfers(self) -> bool:
        """Whether KV blocks come from other engines, or go there."""
        return self.role != "both" or self.kv_transfer_address is not None

    @property
    def has_files(self) -> bool:
        """Whether KV blocks have a place below host memory: files, or other engines."""
        return self.kv_disk_path is not None or self.transfers

    @property
    def transfer_bytes(self) -> int:
        """Memory for blocks that are to be taken."""
        return self.kv_transfer_bytes or 1 << 30

    @property
    def disk_bytes(self) -> int:
        """Most bytes of files of KV blocks."""
        return self.kv_disk_bytes or 16 << 30

    @property
    def lora_rank(self) -> int:
        """The largest rank of an adapter."""
        return self.max_lora_rank or 16

    @property
    def lora_slots(self) -> int:
        """Adapters that a step may have; 0: none are served."""
        return (self.max_loras or 8) if self.enable_lora else 0

    @property
    def whole_loras(self) -> int:
        """Of these, adapters with a head or an embedding of their own."""
        return self.max_lora_modules_to_save or 0

    @property
    def host_loras(self) -> int:
        """Adapters that stay in host memory without a request."""
        return self.max_cpu_loras or self.lora_slots

    @property
    def waits_for_compile(self) -> bool:
        """As ``wait_for_compile`` says, or because the start measures steps, which must be the compiled ones."""
        measures_steps = self.swap_space_bytes and self.preemption_mode == "auto"
        is_shared = self.tensor_parallel_size > 1 or self.pipeline_parallel_size > 1
        return self.wait_for_compile or bool(measures_steps) or self.adapts_drafts or is_shared

    @property
    def adapts_drafts(self) -> bool:
        """Whether how many tokens are drafted follows from measured steps."""
        return self.speculation is not None and self.speculation.adaptive

    @property
    def stream(self) -> Stream | None:
        """What requests see, where it is less than the model would."""
        if self.sliding_window is None:
            return None
        return Stream.of(self.attention_sink_tokens, self.sliding_window, self.block_size)


_INTEGERS = {
    **dict.fromkeys(("max_model_len", "max_num_seqs", "num_kv_blocks", "kv_cache_memory_bytes"), (1, 2**48)),
    "weights_bytes": (1, 2**60),
    "num_state_slots": (2, 2**20),
    "max_num_batched_tokens": (1, 2**20),
    "swap_space_bytes": (0, 2**48),
    "kv_host_bytes": (0, 2**48),
    "kv_disk_bytes": (1, 2**60),
    "kv_transfer_bytes": (1, 2**48),
    "sliding_window": (1, 2**31 - 1),
    "attention_sink_tokens": (0, 2**20),
    "compile_workers": (0, 1024),
    "num_threads": (1, 1024),
    "tensor_parallel_size": (1, 64),
    "pipeline_parallel_size": (1, 64),
    "max_logprobs": (0, 1000),
    "max_loras": (1, 1024),
    "max_lora_rank": (1, 512),
    "max_cpu_loras": (1, 2**20),
    "max_lora_modules_to_save": (0, 1024),
    "max_queued_requests": (1, 2**31 - 1),
    "max_request_id_length": (1, 2**20),
    "max_grammar_bytes": (2**20, 2**48),
    "block_size": (1, 1024),
    "seed": (0, 2**63 - 1),
}
_SMALLEST_TOKEN_BUCKET = 16  # where the sizes are not given


class StepDefaults(NamedTuple):
    """The sizes of steps where the engine arguments leave them open.

    Attributes:
        batched_tokens: most tokens in a step.
        beside_decodes: most tokens in a step in which requests decode. Each of them waits for the whole step.
        decode_buckets: batch sizes of decodes.
        token_buckets: sizes of the other steps, as shares of the largest.
    """

    batched_tokens: int
    beside_decodes: int
    decode_buckets: tuple[int, ...]
    token_buckets: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """The sizes of an engine, all known: what the scheduler obeys and what the buckets are made of."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    decode_bucket_sizes: tuple[int, ...]
    token_bucket_sizes: tuple[int, ...]
    chunked_prefill: bool
    num_state_slots: int = 0  # for states of layers that keep some; 0: the model has no such layer
    num_draft_tokens: int = 0  # most that a drafter proposes for a request and step
    draft_lens: tuple[int, ...] = (1,)  # tokens a request, on average, that decode buckets have room for; from 1
    has_draft_trees: bool = False  # whether drafts may be a tree
    mixes_lens: bool = False  # whether drafts may be in the place of other requests' tokens in all decode buckets
    stream: Stream | None = None  # where requests keep sink tokens and a window
    max_loras: int = 0  # adapters that a step may have
    whole_loras: int = 0  # of these, those with whole matrices
    splits_loras: bool = False  # whether decodes with adapters and without have buckets of their own
    max_tokens_beside_decodes: int | None = None  # of a step in which requests decode; None: no fewer than of others
    steps_at_once: int = 1  # of a pipeline: so many of its stages can compute at once, each a step of other requests

    @property
    def blocks_per_request(self) -> int:
        """Columns of the block table: blocks of the longest request."""
        return -(-self.max_model_len // self.block_size)

    def with_drafts(self, num_draft_tokens: int, *, one_graph: bool, has_trees: bool = False) -> "EngineLimits":
        """These limits where so many tokens may be drafted for a request and step.

        Args:
            one_graph: whether one graph serves all buckets, so that several for each batch size cost nothing.
            has_trees: whether they may be a tree.
        """
        most = 1 + num_draft_tokens
        lens = tuple(2**n for n in range(most.bit_length()) if 2**n < most) if one_graph else (1,)
        return dataclasses.replace(
            self,
            num_draft_tokens=num_draft_tokens,
            has_draft_trees=has_trees,
            draft_lens=tuple(dict.fromkeys((*lens, most))),
            mixes_lens=one_graph,
            splits_loras=self.max_loras > 0 and not one_graph,
        )

    @property
    def most_decode_tokens(self) -> int:
        """Most tokens of a step of a decode bucket: all drafts of one request, or 15 of each of the most."""
        lens, most_requests = self.draft_lens[-1], self.decode_bucket_sizes[-1]
        return max(-(-lens // most_requests), min(lens, 16)) * most_requests  # which the largest bucket holds in full

    def decode_tokens(self, num_requests: int) -> tuple[int, ...]:
        """Tokens of the decode buckets of so many requests, rising."""
        most = self.most_decode_tokens // num_requests
        return tuple(dict.fromkeys(num_requests * min(length, most) for length in self.draft_lens))

    @classmethod
    def resolve(cls, config: EngineConfig, model_max_len: int, defaults: StepDefaults) -> "EngineLimits":
        """Fill in what ``config`` leaves open. ``ValueError`` where its sizes contradict each other or the model."""
        if config.max_model_len is None and model_max_len > MOST_IMPLIED_LEN:
            raise ValueError(
                f"max_model_len must be given for this model: the max_position_embeddings of its config.json, "
                f"{model_max_len}, is more than the {MOST_IMPLIED_LEN} that are taken unasked. Memory grows with it"
            )
        max_model_len = config.max_model_len or model_max_len
        stream = config.stream
        if stream is not None and stream.capacity > model_max_len:
            raise ValueError(
                f"sliding_window and attention_sink_tokens must be at most {model_max_len} together (the model's "
                f"max_position_embeddings), given {stream.window} and {stream.sink_tokens} (in whole blocks)"
            )
        if max_model_len > model_max_len and stream is None:
            most = f"the model's max_position_embeddings, {model_max_len}"
            raise ValueError(
                f"max_model_len must be at most {most}, given {max_model_len}. With sliding_window it may be more"
            )
        buckets = config.bucket_sizes or defaults.decode_buckets
        largest = buckets[-1]
        max_num_seqs = config.max_num_seqs or largest
        if max_num_seqs > largest:
            raise ValueError(
                f"max_num_seqs must be at most the largest of bucket_sizes, {largest}, given {max_num_seqs}: a larger "
                "batch would have no compiled graph. Add a bucket of that size"
            )
        decode = [*(n for n in buckets if n < max_num_seqs), min(n for n in buckets if n >= max_num_seqs)]

        batched, beside_decodes = config.max_num_batched_tokens, None
        if batched is None and config.token_bucket_sizes:
            batched = config.token_bucket_sizes[-1]
        elif batched is None:
            batched = min(max(defaults.batched_tokens, max_num_seqs), max_model_len * max_num_seqs)
            if config.enable_chunked_prefill:
                beside_decodes = min(max(defaults.beside_decodes, max_num_seqs), batched)
            else:
                batched = max(batched, max_model_len)
        if batched < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs, {max_num_seqs} (a token for each running "
                f"request), given {batched}"
            )
        if stream is not None and batched < (needed := stream.sink_tokens + max_num_seqs - 1):
            raise ValueError(
                f"max_num_batched_tokens must be at least {needed} (attention_sink_tokens in whole blocks, which one "
                f"step computes beside a token of each other request), given {batched}"
            )
        if not config.enable_chunked_prefill and batched < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_model_len, {max_model_len}, without chunked prefill (a "
                f"prompt runs in one step), given {batched}"
            )
        if config.token_bucket_sizes is None:
            shares = {int(batched * share) for share in defaults.token_buckets}
            ladder = {size for size in shares if size >= _SMALLEST_TOKEN_BUCKET} | {batched}
        else:
            ladder = set(config.token_bucket_sizes)
            if max(ladder) < batched:
                raise ValueError(
                    f"the largest of token_bucket_sizes must be at least max_num_batched_tokens, {batched}, "
                    f"given {max(ladder)}"
                )
            ladder = {s for s in ladder if s < batched} | {min(s for s in ladder if s >= batched)}
        return cls(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched,
            block_size=config.block_size,
            decode_bucket_sizes=tuple(decode),
            token_bucket_sizes=tuple(sorted(ladder)),
            chunked_prefill=config.enable_chunked_prefill,
            max_loras=config.lora_slots,
            whole_loras=config.whole_loras,
            max_tokens_beside_decodes=beside_decodes,
            stream=stream if stream is not None and stream.sink_tokens else None,
        )
