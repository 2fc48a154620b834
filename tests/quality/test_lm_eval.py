"""The adapter for lm-eval: what it makes of requests and flags; and with lm-eval, the results of its ``hf`` model.

The tasks in ``lm_eval_tasks/`` are read from the directory that the program runs in. Without lm-eval the second half is
skipped: ``pip install 'lm-eval>=0.4.13,<0.5'``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, EngineConfig, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.commands.report.lm_eval import main
from compiled_llm.quality.lm_eval_requests import cut_context, engine_arguments, sampling_params

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "lm_eval_tasks"
NAMES = ["local_choices", "local_words", "local_texts", "local_answers"]
MAX_LENGTH = 256  # so that a text of local_texts has several windows
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": MAX_LENGTH,
    "num_kv_blocks": 200,
    "progress": "off",
}
with_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")


# -- Without lm-eval


def test_a_context_is_cut_at_its_start() -> None:
    assert cut_context([1, 2, 3], [4, 5], 5) == [1, 2, 3]
    assert cut_context([1, 2, 3], [4, 5], 4) == [2, 3]
    assert cut_context([1, 2, 3], [4, 5], 3) == [3]
    with pytest.raises(ValueError, match=r"at most 1 tokens, .* given 2: raise max_model_len"):
        cut_context([1, 2, 3], [4, 5], 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.0}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"temperature": 0.6, "repetition_penalty": 1.1}),
    ],
)
def test_parameters_of_generate_until(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    before = dict(arguments)
    found = sampling_params(arguments, ["\n", "", "END"], 9)
    assert found == SamplingParams(stop=("\n", "END"), max_tokens=9, **expected)
    assert arguments == before


def test_parameters_that_the_engine_does_not_have() -> None:
    for arguments, message in [({"num_beams": 4}, "beam_search"), ({"top_p": 2.0}, "top_p must be a number")]:
        with pytest.raises((ValueError, TypeError), match=message):
            sampling_params(arguments, [], 9)


def test_engine_arguments_survive_json() -> None:
    config = EngineConfig(
        model="/a,b=c", bucket_sizes=(1, 4), kv_cache_dtype="int8", kv_cache_skip_layers=(0,), device="cpu"
    )
    found = json.loads(json.dumps(engine_arguments(config)))
    assert "device" not in found
    assert EngineConfig(model=found.pop("pretrained"), device="cpu", **found) == config
    assert engine_arguments(EngineConfig()) == {}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "compiled_llm", "report", "lm-eval", *words]
    return subprocess.run(command, cwd=TASKS, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_without_lm_eval_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("compiled-llm report lm-eval", ["--tasks", "a"]) == 2
    assert "error: lm-eval is not installed: pip install 'compiled-llm[lm-eval]'" in capsys.readouterr().err


# -- With lm-eval


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    module = importlib.import_module("compiled_llm.quality.lm_eval_model")
    with CompiledEngine(**ENGINE) as engine:
        yield module.CompiledLM(engine=engine)


def evaluate(model: Any, tasks: list[str] = NAMES, **options: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TASKS)
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)


def hf(**options: Any) -> dict[str, Any]:
    model_args = {"pretrained": str(DEMO_MODEL), "dtype": "float32", "max_length": MAX_LENGTH}
    return evaluate("hf", model_args=model_args, device="cpu", batch_size=1, **options)


def check_same(found: dict[str, Any], expected: dict[str, Any], tasks: list[str] = NAMES) -> None:
    """The same accuracies and texts; log-likelihoods within 1e-4."""
    for task in tasks:
        for metric, value in expected["results"][task].items():
            other = found["results"][task][metric]
            if isinstance(value, float):
                assert other == pytest.approx(value, rel=1e-4), (task, metric)
            else:
                assert other == value, (task, metric)
        samples, others = found["samples"][task], expected["samples"][task]
        assert len(samples) == len(others) > 3
        for sample, other in zip(samples, others, strict=True):
            assert sample["doc_id"] == other["doc_id"]
            assert json.dumps(sample["arguments"]) == json.dumps(other["arguments"])
            for answer, wanted in zip(flat(sample["resps"]), flat(other["resps"]), strict=True):
                assert answer == (
                    wanted if isinstance(wanted, str | bool) else pytest.approx(wanted, abs=1e-4, rel=1e-5)
                )


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for part in value for item in flat(part)]
    return [value]


@with_lm_eval
@pytest.mark.filterwarnings("ignore")
def test_results_of_lm_evals_own_model(model: Any) -> None:
    expected = hf()
    found = evaluate(model)
    check_same(found, expected)
    accuracy = expected["results"]["local_choices"]["acc,none"]
    assert 0.5 < accuracy < 1, "the task tells nothing"
    (long,) = [s for s in found["samples"]["local_texts"] if len(model.tok_encode(s["doc"]["text"])) > 2 * MAX_LENGTH]
    assert long["resps"]


@with_lm_eval
@pytest.mark.filterwarnings("ignore")
def test_chats(model: Any) -> None:
    names = ["local_words", "local_answers"]
    options = {"tasks": names, "apply_chat_template": True, "fewshot_as_multiturn": True}
    expected = hf(**options)
    found = evaluate(model, **options)
    prompts = [sample["arguments"][0][0] for sample in found["samples"]["local_answers"]]
    plain = [sample["doc"]["context"] for sample in found["samples"]["local_answers"]]
    rendered = [model.apply_chat_template([{"role": "user", "content": text}]) for text in plain]
    assert prompts == rendered != plain
    check_same(found, expected, names)


@with_lm_eval
@pytest.mark.filterwarnings("ignore")
def test_begin_of_text_prefix_and_thoughts(model: Any) -> None:
    assert model.prefix_token_id == model.eot_token_id == model.tokenizer.eos_token_id
    module = importlib.import_module("compiled_llm.quality.lm_eval_model")
    other = module.CompiledLM(engine=model.engine, prefix_token_id=5, think_end_token="=")
    assert other.prefix_token_id == 5
    assert other.tok_encode("import os") == model.tok_encode("import os")
    from lm_eval.api.instance import Instance

    def instances(kind: str, *arguments: tuple) -> list[Any]:
        return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]

    asked = instances("loglikelihood", ("", "import os"), ("x = ", "5"), ("x =", " 5"))
    first, *spaces = other.loglikelihood(asked, disable_tqdm=True)
    assert first != model.loglikelihood(asked, disable_tqdm=True)[0], "another token is before it"
    assert spaces[0] == pytest.approx(spaces[1], abs=1e-5), "spaces at the end of a context belong to the continuation"
    long = instances("loglikelihood", ("x = 5\n" * 500, "x = 5"))
    (cut,) = model.loglikelihood(long, disable_tqdm=True)
    assert cut[0] < 0
    options = {"until": ["\n"], "max_gen_toks": 30}
    (text,) = model.generate_until(instances("generate_until", ("def f(x):\n    y", options)), disable_tqdm=True)
    (after,) = other.generate_until(instances("generate_until", ("def f(x):\n    y", options)), disable_tqdm=True)
    assert "\n" not in text
    assert "=" not in after
    with pytest.raises(ValueError, match="max_gen_toks must be below 256"):
        model.generate_until(instances("generate_until", ("x", {"max_gen_toks": 256})), disable_tqdm=True)
    with pytest.raises(ValueError, match="max_batch_size must be None"):
        module.CompiledLM(engine=model.engine, max_batch_size=4)
    with pytest.raises(ValueError, match="engine must be None"):
        module.CompiledLM(engine=model.engine, dtype="float32")


@with_lm_eval
@pytest.mark.filterwarnings("ignore")
def test_the_program(model: Any, tmp_path: Path) -> None:
    flags = ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--num-kv-blocks", "200"]
    own = ["--include_path", ".", "--output_path", str(tmp_path / "out.json"), "--log_samples", "--limit", "4"]
    done = run("--model", str(DEMO_MODEL), *flags, "--tasks", "local_choices,local_answers", "--", *own)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "local_choices" in done.stdout
    (path,) = tmp_path.rglob("*.json")
    found = json.loads(path.read_text())["results"]
    expected = evaluate(model, ["local_choices", "local_answers"], limit=4)["results"]
    for task in ("local_choices", "local_answers"):
        for metric, value in expected[task].items():
            assert "stderr" in metric or found[task][metric] == value  # evaluate() does without the errors
