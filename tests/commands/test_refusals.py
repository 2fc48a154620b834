"""What commands refuse, before anything is loaded or measured: status 2, with the reason on stderr."""

from pathlib import Path

import pytest
import torch

from compiled_llm.__main__ import main

NOWHERE = "/no/such/directory"
KV = "report kv-cache --max-tokens 8"
INT8 = "report weights --max-tokens 8 --quantization int8"
PERPLEXITY = f"report perplexity --text {__file__}"
QUANTIZE = "quantize --output new --window 256 --max-tokens 600 --eval-max-tokens 0 --method"
LM_EVAL = "report lm-eval --tasks a"
COMMANDS_WITH_JSON = (
    "exact",
    KV,
    INT8,
    PERPLEXITY,
    f"{QUANTIZE} rtn --kind int8",
    "compile",
    "tune buckets --trace t",
    "tune quantization",
)
PLAN = "plan --models tiny --machines h200:1x1 --slo ttft:5"
PLANS = {
    "": "--trace or --rate must be given",
    "--rate 0": "--rate must be a number above 0",
    "--rate 1 --cv nan": "--cv must be a number above 0",
    "--rate 1 --popularity -1": "--popularity must be from 0 to 10",
    "--rate 1 --prompt-tokens 0": "--prompt-tokens must be at least 1",
    "--rate 1 --costs costs.json": "for measured machines and for no others",
    "--rate 1 --trace x.jsonl": "--rate must be left out with --trace",
    "--rate 1 --models-per-group 0": "--models-per-group must be at least 1",
    "--rate 1 --no-curves --picture x.png": "--picture must be left out with --no-curves",
    "--trace no-such-file.jsonl": "no-such-file.jsonl",
    "--rate 0.001 --seconds 1": "gives no request in --seconds 1.0",
}
REFUSED = {
    **{f"{command} --json {NOWHERE}/out.json": "its directory is not there" for command in COMMANDS_WITH_JSON},
    f"exact --model {NOWHERE}": NOWHERE,
    "exact --kv-cache-dtypes int4": "kv_cache_dtype must be one of",
    "exact --dtype int8": "dtype must be one of",
    "exact --requests 0": "--requests must be at least 1",
    "exact --tokens 1024": "--tokens must be below 1024",
    "exact --device tpu": "device must be",
    "report kv-cache": "--kv-cache-dtype must be one of int8, fp8, given auto",
    f"{KV} --kv-cache-dtype int8 --kv-cache-skip-layers 4": "kv_cache_skip_layers must be layers of the model, 0 to 3",
    f"{KV} --kv-cache-dtype int8 --kv-cache-skip-layers 0,1,2,3": "leave a layer",
    f"{KV} --kv-cache-dtype int8 --text no-such-file.txt": "no-such-file.txt",
    f"{KV} --kv-cache-dtype int8 --window 1025": "at most the model's length, 1024",
    f"{KV} --kv-cache-dtype int8 --chunk 0": "--chunk must be at least 1",
    "report weights": "give either --quantization",
    f"{INT8} --quantized-model x": "give either --quantization",
    f"{INT8},int5": "quantization must be",
    f"{INT8},fp8 --quantization-group-size 64": "quantization_group_size must be None",
    f"{INT8} --quantization-head int3": "quantization_head must be",
    "report weights --quantized-model x --quantization-skip layers.0": "without quantization",
    f"report weights --quantized-model {NOWHERE}": NOWHERE,
    f"{INT8} --quantization-skip * --quantization-head none": "no layer is quantised",
    f"{INT8} --speed-tokens 1": "--speed-tokens must be at least 2",
    f"{INT8} --speed-tokens 1024 --no-layers": "--speed-tokens must be below",
    f"{PERPLEXITY} --stride 0": "--stride must be at least 1, given 0",
    f"{PERPLEXITY} --strides 5": "unknown flag --strides",
    "report lm-eval": "the following arguments are required: --tasks",
    f"{LM_EVAL} --dtype int3": "dtype must be one of",
    f"{LM_EVAL} --limit 5": "unknown flag --limit",
    f"{LM_EVAL} -- --model hf": "--model must be given before the --",
    f"{LM_EVAL} -- --device=cpu": "--device=cpu must be given before the --",
    f"{LM_EVAL} b": "flags of lm-eval are given after a --, given 'b'",
    "plan --models tiny": "the following arguments are required: --machines, --slo",
    **{f"{PLAN} {words}": said for words, said in PLANS.items()},
    "plan --models tiny tiny*2 --machines h200:1x1 --slo ttft:5 --rate 1": "--models must differ",
    "plan --models tiny*0 --machines h200:1x1 --slo ttft:5 --rate 1": "NAME*N with N up to 999, given 'tiny*0'",
    "plan --models tiny --machines h200:8 --slo ttft:5 --rate 1": "--machines must be KIND:NxM",
    "plan --models tiny --machines h900:1x8 --slo ttft:5 --rate 1": "given 'h900:1x8'",
    "plan --models tiny --machines measured:1x1 --slo ttft:5 --rate 1": "--costs must be given for measured machines",
    "plan --models tiny --machines h200:1x1 --slo itl:5 --rate 1": "--slo must be METRIC:NUMBER",
    "plan --models tiny --machines h200:1x1 --slo ttft:0 --rate 1": "given 'ttft:0'",
    "report gpu-step --picture step.txt": "must end in .png, .svg or .pdf",
    f"report gpu-step --picture {NOWHERE}/step.png": "its directory is not there",
    "report gpu-step --measured nothing.json": "No such file",
    "report gpu-step --measured nothing.json --bucket tokens_512": "--bucket must be one, given tokens_512",
    "report gpu-step --bucket decode_8x4": "--bucket must be decode_<size> or tokens_<size>, given 'decode_8x4'",
    "report gpu-step --bucket 8": "--bucket must be decode_<size> or tokens_<size>, given '8'",
    f"{QUANTIZE} rtn --kind int8 --group-size 32": "scales of its own",
    f"{QUANTIZE} smoothquant --kind int4": "choose method awq, gptq or awq+gptq",
    f"{QUANTIZE} rtn --kind int4 --group-size 96": "no multiple of the group size 96",
    f"{QUANTIZE} rtn --kind int4 --group-size 8": "multiple of 16",
    f"{QUANTIZE} rtn --kind int8_w8a8 --zeros": "given zeros",
    f"{QUANTIZE} awq --kind int4 --alpha 0.5": "alpha must be",
    f"{QUANTIZE} rtn --kind int8 --skip layers.0 gate_up": "given 'gate_up', which no layer has",
    "chat a --model b": "--model must be left out where MODEL is given, given 'b'",
    "chat --url ftp://a": "URL must be as http://127.0.0.1:8000",
    "chat --url a --bucket-sizes 1": "--bucket-sizes must be left out with --url",
    "chat --url a --top-p 4": "top_p",
    "chat --api-key a": "--api-key must be left out without --url",
    "tokenize": "TEXT must be one argument",
    "tokenize a --file b": "TEXT must be left out with --file",
    f"tokenize --file {NOWHERE}": "--file must be a text in UTF-8",
    f"tokenize a --model {NOWHERE}": NOWHERE,
    "tokenize a --chat --split-special-tokens": "must be left out with --chat",
    "serve a --model b": "MODEL and --model must not be given both",
    "serve --lora-modules a": "lora_modules must be NAME=PATH",
    "serve --lora-modules a=b": "lora_modules needs enable_lora",
    "chat --url a --lora b": "--lora must be left out with --url",
    f"merge-lora {NOWHERE} a b": NOWHERE,
    "serve --max-replicas 2": "max_replicas is for --ray, given 2",
    "serve --ray --max-replicas 1 --data-parallel-size 2": "at least data_parallel_size, 2, given 1",
    "serve --ray --restart-engine": "restart_engine must not be given with Ray Serve: Ray Serve starts an engine again",
    "serve --ray somewhere": "--ray must be HOST:PORT, given somewhere",
    "serve --port 65536": "port must be an integer from 0 to 65535",
    f"serve --api-key-file {NOWHERE}": "--api-key-file must be a text in UTF-8",
    "serve --drain-second 3": "unknown flag --drain-second: did you mean '--drain-seconds'?",
    "compile --enforce-eager": "compiles nothing",
    f"compile --export {NOWHERE}/file": "its directory is not there",
    f"compile --shape tiny --import {__file__}": "is no bundle",
    "tune buckets --trace none.json": "No such file",
    "tune buckets --trace none.json --max-buckets 0": "--max-buckets must be at least 1",
    "tune buckets --trace none.json --runs-per-start 0": "--runs-per-start must be above 0",
    "tune speculation": "the following arguments are required: --trace",
    "tune speculation --trace none.jsonl": "No such file",
    "tune speculation --trace t --batch-sizes 4 1": "--batch-sizes must rise, given 4 1",
    "tune speculation --trace t --batch-sizes 3 --bucket-sizes 1,4": "--batch-sizes must be among --bucket-sizes, 1, 4",
    "tune speculation --trace t --draft-tokens 3 64": "--draft-tokens must be at most 63 for ngram, given 64",
    "tune speculation --trace t --prompt-lookups 4-2": "must be MIN-MAX within 1-16, as 2-4",
    "tune speculation --trace t --max-requests 0": "--max-requests must be at least 1",
    "tune speculation --trace t --methods eagle": "must be one of ngram, suffix, lookahead, draft_model",
    "tune speculation --trace t --methods ngram medusa": "--drafters must have medusa=DIR for --methods medusa",
    "tune speculation --trace t --methods ngram --drafters eagle3=d": "must be of --methods, ngram, given eagle3",
    "tune speculation --trace t --drafters layer_skip=d": "must be METHOD=DIR with a METHOD of draft_model, eagle3",
    "tune speculation --trace t --methods layer_skip --draft-tokens 16": "must be at most 15 for layer_skip, given 16",
    "tune speculation --trace t --temperature -1": "temperature",
    'tune speculation --trace t --speculative-config {"method":"ngram"}': "--speculative-config must be left out",
    "tune quantization --rows 8 1": "--rows must rise, given 8 1",
    "tune quantization --prompt-tokens -1": "--prompt-tokens must be at least 0",
    "tune quantization --quantization int5": "quantization must be",
    "tune quantization --quantization int8 --quantization-group-size 64": "quantization_group_size must be None",
    "tune quantization --quantization int8 --quantization-skip gate_up": "given 'gate_up', which names none",
    f"tune quantization --model {NOWHERE}": NOWHERE,
    "tune attention": "no CUDA GPU here",
    "tune linear": "no CUDA GPU here",
    "tune linear --layer 6144": "must be OUTPUTSxINPUTS",
    "tune linear --rows 64 16": "--rows must rise",
    "tune linear --rows 512 --kind bfloat16": "--rows must begin with up to 256",
    "tune linear --kind int5": "must be one of",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status: object = main(command.split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert REFUSED[command] in " ".join(capsys.readouterr().err.split())
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
