"""lm-eval's own clients for OpenAI's interface have the numbers of the engine's adapter for lm-eval, to the bit."""

import importlib
import importlib.util
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.server.settings import DEMO_NAME
from tests.quality.test_lm_eval import evaluate, flat
from tests.server.conftest import SIZES, Running

pytestmark = [
    pytest.mark.battery,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


def check_same(client: str, path: str, reference: CompiledEngine, running: Running, **options: Any) -> None:
    """Log-likelihoods and texts of a client of lm-eval are those of ``CompiledLM``."""
    adapter = importlib.import_module("compiled_llm.quality.lm_eval_model").CompiledLM
    arguments = {
        "model": DEMO_NAME,
        "base_url": f"{running.url}/v1/{path}",
        "tokenizer": str(DEMO_MODEL),
        "max_length": SIZES["max_model_len"],
    }
    found = evaluate(client, model_args=arguments, **options)["samples"]
    expected = evaluate(adapter(engine=reference), **options)["samples"]
    for task in expected:
        rows = [[flat(one["resps"]) for one in sorted(samples, key=lambda one: one["doc_id"])]
                for samples in (found[task], expected[task])]  # fmt: skip
        assert [[str(value) for value in row] for row in rows[0]] == [[str(value) for value in row] for row in rows[1]]


def test_completions(reference: CompiledEngine, running: Running) -> None:
    """Without long texts: that client's windows of them are a token shorter, since each request generates one."""
    tasks = ["local_choices", "local_words", "local_answers"]
    check_same("local-completions", "completions", reference, running, tasks=tasks)


def test_chats(reference: CompiledEngine, running: Running) -> None:
    options: Any = {"tasks": ["local_answers"], "apply_chat_template": True}
    check_same("local-chat-completions", "chat/completions", reference, running, **options)
