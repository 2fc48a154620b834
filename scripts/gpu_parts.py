"""The parts of ``gpu_validate.py``: what each one runs, and for how long."""

import importlib.util
from typing import NamedTuple


class Part(NamedTuple):
    """``seconds``: the most that it may take, of one with ``gib`` from its turn on.

    ``command``: arguments of Python; {json} is a file for its result, {folder} a folder for more.

    ``gib``: of GPU memory, of a part that prepares beside others and measures in turn; None: it runs alone.
    """

    seconds: float
    command: str
    gib: float | None = None


# With many cores, hundreds of kernel variants compile in parallel. pytest-benchmark then warns, which is an error here.
_PARALLEL = "-n 12" if importlib.util.find_spec("xdist") else ""
_PYTEST = "-m pytest -v -W default -p no:benchmark -p no:cacheprovider"

_BENCH = "-m compiled_llm bench"
_LATENCY = f"{_BENCH} latency --device cuda --output-json {{json}}"
_THROUGHPUT = f"{_BENCH} throughput --device cuda --output-json {{json}}"
_W2 = "--shape qwen3-0.6b --workload W2"
_BUCKETS = "--bucket-sizes 1,8,32 --token-bucket-sizes 512,2048"
_ATTENTION_TESTS = "tests/ops/attention/test_attention_gpu.py tests/ops/attention/test_triton_latent.py"
_GPU_TESTS = (
    "-m gpu tests/e2e/test_gpu.py tests/ops/test_swap.py tests/ops/sampling/test_sampling_gpu.py "
    "tests/ops/test_programmatic_launch.py"
)
_EXACT_TESTS = (
    "-m gpu tests/ops/rowwise/test_rowwise_gpu.py tests/ops/linear/test_exact_linear.py "
    "tests/ops/linear/test_triton_surroundings.py "
    "tests/ops/attention/test_triton_exact.py"
)
_PHASES = f"{_LATENCY} --input-len 2048 --batch-size 8 --num-iters 3"
_PHASE_BUCKETS = "--bucket-sizes 8 --token-bucket-sizes 2048"
_QUANTIZED_SIZES = "6144x4096 24576x4096 4096x12288 1536x2048x128x8"  # of Qwen3-8B and of Qwen3-30B-A3B
_PRODUCTS = f"{_BENCH} products --device cuda"
_QUANTIZED = (
    f"{_PRODUCTS} --kind int8 int8_w8a8 int4 int4_w4a8 fp8 mxfp4 --size {_QUANTIZED_SIZES} "
    "--rows 1 8 32 512 2048 --seconds 0.2 --json {json}"
)
_AROUND = "--around --rows 1 32 64 128 256 2048 --seconds 0.2 --limit 45"
_PROBE = (
    "--turned --heads 32 --decode 1x1025 32x1025 1x64 1x384 1x8193 1x32769 8x1025 256x1025 32x8193 1x32769,31x1025 "
    "--prefill 2048+0 8192+0 2048+6144 --skip gather sdpa flex --seconds 1 --limit 38"
)
_START = f"{_BENCH} start --device cuda --dtype bfloat16 --max-model-len 8192 --load-format dummy --folder {{folder}}"
_DECODES = f"{_LATENCY} --input-len 32 --output-len 128 --num-iters 5 --token-bucket-sizes 512"

_KERNELS = f"{_BENCH} kernels --device cuda"
_SHAPES = {"0.6b": "qwen3-0.6b", "8b": "llama-3.1-8b"}
_GIB = {"0.6b": 4, "8b": 19}  # of GPU memory, for an engine with a small KV pool
_PROMPTS = "--prompts 2048 8192"
# (batch size, what is different, more flags, layers, GiB of the KV pool)
_STEPS = [
    ("8b", 1, "", "", 0),
    ("8b", 1, "-prompts", _PROMPTS, 0),
    ("8b", 32, "", "", 5),
    ("8b", 8, "", "", 5),
    ("0.6b", 1, "", "", 0),
    ("0.6b", 1, "-prompts", _PROMPTS, 0),
    ("0.6b", 32, "", "", 4),
    ("8b", 1, "-manual", "--cuda-graphs manual", 0),
    ("8b", 8, "-manual", "--cuda-graphs manual", 5),
    ("8b", 32, "-manual", "--cuda-graphs manual", 5),
    ("0.6b", 32, "-manual", "--cuda-graphs manual", 4),
    ("8b", 1, "-exact", f"--exact --layers 12 {_PROMPTS}", -10),
    ("0.6b", 1, "-manual", "--cuda-graphs manual", 0),
    ("8b", 1, "-few", "--layers 12", -10),
    ("8b", 256, "", "--layers 12", 2),
]


PARTS = {
    "smoke": Part(200, f"{_PYTEST} -m gpu tests/e2e/test_gpu_smoke.py"),
    "limits": Part(30, "scripts/gpu_validate.py --measure-limits {json}", 2),
    **{
        f"kernels-{name}-{batch_size}{what}": Part(
            60,
            f"{_KERNELS} --shape {_SHAPES[name]} --batch-size {batch_size} {flags} --json {{json}}",
            _GIB[name] + gib,
        )
        for name, batch_size, what, flags, gib in _STEPS
    },
    **{
        f"products-{name}{what}": Part(60, f"{_PRODUCTS} --shape {shape} {flags} --json {{json}}", 8)
        for name, shape in _SHAPES.items()
        for what, flags in (("", "--seconds 0.05 --limit 50"), ("-around", _AROUND))
    },
    "probe-attention": Part(55, f"{_BENCH} attention --device cuda {_PROBE} --json {{json}}", 14),
    "gpt-fast": Part(40, f"{_BENCH} gpt-fast --checkout .gpt-fast --json {{json}}", 18),
    **{
        f"start{what}": Part(seconds, f"{_START} --shape {shape} {flags} --seconds {seconds - 10} --json {{json}}")
        for what, seconds, shape, flags in (
            ("", 110, "llama-3.1-8b", "--warm-runs 1"),
            ("-few", 60, "qwen3-0.6b", "--warm-runs 1 --bucket-sizes 1 --token-bucket-sizes 128"),
        )
    },
    "smoke-engine": Part(150, f"{_PYTEST} -m gpu tests/e2e/test_gpu_smoke.py -k engine"),
    "host": Part(70, f"{_BENCH} host --device cuda --layers 8 --steps 150 --output {{folder}}"),
    "code": Part(45, "scripts/gpu_code.py --output {folder}"),
    "e2e": Part(420, f"{_PYTEST} {_GPU_TESTS}"),
    **{
        f"{mode}-{batch_size}": Part(
            120, f"{_DECODES} --cuda-graphs {mode} --bucket-sizes {batch_size} --batch-size {batch_size}"
        )
        for batch_size in (1, 8, 32, 256)
        for mode in ("trees", "manual", "programmatic")
        if (mode, batch_size) not in (("trees", 8), ("programmatic", 256))
    },
    "exact": Part(240, "-m compiled_llm exact --device cuda --quick --json {json}"),
    "exact-ops": Part(300, f"{_PYTEST} {_EXACT_TESTS}"),
    **{
        f"exact-{batch_size}": Part(120, f"{_DECODES} --exact --bucket-sizes {batch_size} --batch-size {batch_size}")
        for batch_size in (1, 32)
    },
    "exact-phases": Part(150, f"{_PHASES} {_PHASE_BUCKETS} --exact"),
    "latency": Part(240, f"{_THROUGHPUT} --shape qwen3-8b --workload W1 --bucket-sizes 1 --token-bucket-sizes 128"),
    "throughput": Part(240, f"{_THROUGHPUT} {_W2} {_BUCKETS}"),
    "transformers": Part(120, f"{_THROUGHPUT} --backend hf {_W2} --hf-max-batch-size 32"),
    "attention": Part(240, f"{_BENCH} attention --device cuda --seconds 1 --json {{json}}"),
    "sampling": Part(240, f"{_BENCH} sampling --batch-size 32 --json {{json}}"),
    "serve": Part(
        240, f"{_BENCH} arrivals --device cuda {_W2} {_BUCKETS} --request-rate 16 --goodput ttft:200 tpot:20"
    ),
    "report": Part(120, f"scripts/serve_offline.py --device cuda {_BUCKETS} --quiet --report {{folder}}"),
    "phases-compiled-llm": Part(150, f"{_PHASES} {_PHASE_BUCKETS}"),
    "phases-hf": Part(150, f"{_PHASES} --backend hf"),
    **{
        f"prefix-{name}": Part(120, f"{_THROUGHPUT} --workload W3 --bucket-sizes 16 --token-bucket-sizes 512 --{flag}")
        for name, flag in (("on", "enable-prefix-caching"), ("off", "no-enable-prefix-caching"))
    },
    "quantised": Part(300, f"{_PYTEST} -m gpu tests/ops/linear/test_triton_quantized.py"),
    "quantised-speed": Part(480, _QUANTIZED),
    "ranks": Part(100, "scripts/gpu_ranks.py --json {json}"),
    "kernels": Part(500, f"{_PYTEST} {_PARALLEL} -m gpu {_ATTENTION_TESTS}"),
    "tune": Part(540, "-m compiled_llm tune attention --head-dim 128 --kv-cache-dtype auto int8 fp8 --seconds 480"),
    "tune-linear": Part(540, "-m compiled_llm tune linear --seconds 480"),
    "tune-products": Part(360, "-m compiled_llm tune linear --kind bfloat16 --seconds 300"),
}
