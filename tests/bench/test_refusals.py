"""What each benchmark refuses, before anything is loaded: exit status 2, the reason on stderr, nothing on stdout."""

from pathlib import Path

import pytest
import torch

from compiled_llm.__main__ import main
from compiled_llm.commands.bench import BENCHES

HF = ("--backend", "hf", "--hf-max-batch-size", "8")
GOODPUT = ("--find-goodput", "--goodput", "ttft:5")
# benchmark -> (arguments, what the message says)
REFUSED: dict[str, list[tuple[str, str]]] = {
    "latency": [
        (f"--report {__file__}", "is a file: give a directory"),
        ("--top-p 2", "top_p"),
        ("--n 2", "--n must be 1, given 2"),
        ("--batch-size 0", "--batch-size must be at least 1"),
        ("--num-iters-warmup -1", "--num-iters-warmup"),
        ("--output-json /no/such/directory/out.json", "/no/such/directory"),
        ("--shape tiny --enforce-eager --input-len 2000 --max-model-len 1024", "must fit in 1024 tokens"),
        ("--shape tiny --load-format safetensors", "--load-format"),
        ("--shape tiny --model DIR", "not allowed with"),
        ("--shape tiny --bucket-sizes 8,8", "duplicates"),
        ("--model /no/such/directory", "/no/such/directory"),
        ("--backend hf --bucket-sizes 1", "--bucket-sizes has no meaning"),
    ],
    "throughput": [
        ("--workload W9", "W9"),
        ("--shape tiny --workload W1 --num-prompts 3", "--num-prompts cannot be given with --workload"),
        ("--shape tiny --dataset-name custom", "needs --dataset-path"),
        ("--shape tiny --dataset-name random --dataset-path x.jsonl", "must be custom"),
        ("--shape tiny --dataset-path x.jsonl --input-len 3", "--input-len cannot be given with --dataset-path"),
        ("--shape tiny --dataset-path no-such-file.jsonl", "no-such-file.jsonl"),
        ("--shape tiny --input-len 3 --random-input-len 3", "--random-input-len cannot be given with --input-len"),
        ("--shape tiny --random-range-ratio 1", "--random-range-ratio must be at least 0 and below 1"),
        ("--shape tiny --random-prefix-len -1", "--random-prefix-len"),
        ("--shape tiny --input-len 50000", "must fit in 40960 tokens"),
        ("--repeats 0", "--repeats must be at least 1"),
        ("--backend hf", "needs --hf-max-batch-size"),
        ("--hf-max-batch-size 8", "needs --backend hf"),
        (" ".join((*HF, "--report", "x")), "--report has no meaning"),
        (" ".join((*HF, "--temperature", "1")), "--temperature has no meaning"),
    ],
    "serve": [
        ("--rates 1,fast", "given 'fast'"),
        ("--rates 0", "--rates must be numbers above 0"),
        ("--rates 1 --request-rate 1", "--request-rate must be left out"),
        (f"{' '.join(GOODPUT)} --rates 1", "--rates must be left out"),
        ("--goodput itl:5", "given 'itl:5'"),
        ("--extra-body []", "--extra-body must be a JSON object"),
        ("--header x", "--header must be NAME=VALUE"),
        ("--max-concurrency 0", "--max-concurrency must be at least 1"),
        ("--picture load.txt", "must end in .png, .svg or .pdf"),
        ("--base-url ftp://here", "URL must be as http://127.0.0.1:8000"),
    ],
    "servers": [("--model m --vllm-python p --concurrency 1,many", "--concurrency must be numbers")],
    "roles": [("--input-len 100", "--input-len must be at least 256"), ("--streams 0", "--streams must be at least 1")],
    "arrivals": [
        ("--request-rate 0", "--request-rate must be above 0"),
        ("--burstiness -1", "--burstiness must be above 0"),
        ("--max-concurrency 0", "--max-concurrency must be at least 1"),
        ("--percentile-metrics ttft,latency", "given 'latency'"),
        ("--percentile-metrics client_queue_time", "with --max-concurrency also"),
        ("--metric-percentiles 101", "from 0 to 100, given '101'"),
        ("--goodput itl:5", "given 'itl:5'"),
        ("--goodput ttft:5 ttft:6", "once; given 'ttft:6'"),
        ("--goodput ttft:fast", "given 'fast'"),
        ("--find-goodput", "--find-goodput needs --goodput"),
        (" ".join((*GOODPUT, "--request-rate", "1")), "--request-rate must be left out"),
        (" ".join((*GOODPUT, "--max-concurrency", "1")), "--max-concurrency must be left out"),
        (" ".join((*GOODPUT, "--goodput-share", "0")), "--goodput-share"),
        (" ".join((*GOODPUT, "--report", "x")), "--report must be left out"),
        ("--save-detailed", "needs --save-result"),
    ],
    "peers": [
        ("--repeats 0", "--repeats"),
        ("--threads 0", "--threads must be from 1"),
        ("--engine-args [1]", "must be a JSON object"),
        ("--vllm-args {", "--vllm-args"),
        ("--workloads W9", "W9"),
        ("--check --output-len 0", "--output-len"),
    ],
    "settings": [
        ("--precisions int8 int8", "must differ"),
        ("--precisions none", "two settings"),
        ("--shape tiny --enforce-eager --precisions none int3", "quantization"),
        ("--precisions none int8 --repeats 0", "--repeats"),
    ],
    "step-costs": [("--costs /no/such/directory/costs.json", "its directory is not there"), ("", "required: --costs")],
    "plan": [("--load 0", "--load must be"), ("--seconds 1", "--seconds must be at least 5"), ("--cvs -1", "--cvs")],
    "shared": [("--rounds 0", "--rounds")],
    "start": [
        ("--warm-runs 0", "--warm-runs"),
        ("--demo --model x", "--demo and --model"),
        ("--other nowhere", "--other must be a checkout"),
    ],
    "loading": [("--rounds 0", "--rounds")],
    "host": [("--requests 0", "--requests"), ("--kinds-of x", "unknown flag")],
    "speculation": [
        ("--num-tokens 1", "--num-tokens must be at least 2"),
        ("--widen qwen3-0.6b", "--model must be a checkpoint"),
        ("--processes 0", "--processes must be at least 1"),
        ("--model DIR --processes 2 --vllm-python x", "--processes must be 1 with --vllm-python"),
        ("--model DIR --groups 2 --vllm-python x", "--groups must be 1 with --vllm-python"),
    ],
    "lora": [
        ("--rank 0", "--rank must be at least 1"),
        ("--batch-sizes 0", "--batch-sizes"),
        ("--vllm-python x", "--vllm-python needs --model"),
    ],
    "tiers": [("--input-len 8", "--input-len must be at least 32")],
    "sampling": [("--context 1", "--context must be at least 2")],
    "kernels": [("--layers 0", "--layers must be at least 1"), ("--model DIR --layers 2", "for a --shape")],
    "attention": [
        ("--decode 8", "BATCHxCONTEXT"),
        ("--decode 0x8", "at least 1"),
        ("--prefill 512", "TOKENS+CONTEXT"),
        ("--prefill 0x4+512", "at least 1"),
        ("--decode --prefill", "nothing to measure"),
        ("--kv-dtype int4", "int4"),
        ("--kv-heads 3", "multiple of --kv-heads"),
        ("--head-dim 127", "--head-dim must be even"),
        ("--seconds nan", "--seconds"),
    ],
    "products": [
        ("--size 6144", "neither OUTPUTSxINPUTS nor"),
        ("--size 16x64x4x5", "neither OUTPUTSxINPUTS nor"),
        ("--rows 0", "--rows"),
        ("--layers qvk", "--layers must be of qkv, o, gate_up, down, lm_head, given 'qvk'"),
        ("--experts --kind int8", "--kind must be plain"),
        ("--device cuda --size 16x64x4x2", "--kind must be quantised"),
        ("--around", "--around needs --device cuda"),
    ],
    "all-reduce": [("--ranks 0", "--ranks must be at least 1"), ("--kib 0", "--kib")],
    "gpt-fast": [("--checkout /", "--checkout must be a folder with gpt-fast's model.py")],
    "": [("", "one of latency, throughput"), ("latncy", "did you mean 'latency'?")],
}
CASES = [(name, words, said) for name, cases in REFUSED.items() for words, said in cases]


def test_each_benchmark_refuses_something() -> None:
    assert set(REFUSED) == {*BENCHES, ""}


@pytest.mark.parametrize(("name", "words", "said"), CASES)
def test_bad_arguments_exit_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, words: str, said: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    try:
        status = main(["bench", *filter(None, [name]), *words.split()])
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert said in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
@pytest.mark.parametrize(
    "words", ["kernels", "attention --device cuda", "products --device cuda", "gpt-fast --checkout DIR"]
)
def test_no_gpu_is_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str) -> None:
    (tmp_path / "model.py").touch()
    assert main(["bench", *words.replace("DIR", str(tmp_path)).split()]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_the_list_of_benchmarks_comes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name:12}{text}\n" in out for name, text in BENCHES.items())
