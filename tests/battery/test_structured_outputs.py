"""Constrained generations: 20 schemas, many seeds, in batches with an unconstrained one; all parse and validate."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from compiled_llm import CompiledEngine, Field, LogitsContext, LogitsTransform, SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.text.tokenizer import Tokenizer
from tests.schemas import SCHEMAS

SIZES = [pytest.param(1, 7, id="small"), pytest.param(25, len(SCHEMAS), id="full", marks=pytest.mark.battery)]
PROMPT = "import json\n\nrecord = json.loads('''"
# What ends a string, then what ends an object or a list, then what ends a number.
WEIGHTS = {'"': 0.25, "@": 0.15, "n": 0.12, "}": 0.1, "]": 0.1, ",": 0.05}


class Hurry(LogitsTransform):
    """Makes what ends a text likelier with each token: the demo model knows only Python, and would write for ever."""

    name = "hurry"

    def __init__(self) -> None:
        tokenizer = Tokenizer(DEMO_MODEL)
        self.start = len(tokenizer.encode(PROMPT))
        size = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
        self.weights = [WEIGHTS.get(tokenizer.decode([i])[:1], 0.0) for i in range(size)]
        self.fields = {"weights": Field((size,), torch.float32, 0.0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        return {"weights": self.weights}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        return logits + fields["weights"] * (context.position[:, None] - self.start)


@pytest.mark.parametrize(("num_seeds", "num_schemas"), SIZES)
def test_all_generations_parse_and_validate(num_seeds: int, num_schemas: int, battery_counts: Counter[str]) -> None:
    schemas = SCHEMAS[:num_schemas]
    free = SamplingParams(max_tokens=40, seed=5)
    arguments = {"enforce_eager": True, "dtype": "float32", "bucket_sizes": (32,), "check_invariants": True}
    with CompiledEngine(**arguments, logits_transforms=[Hurry()]) as engine:
        alone = engine.generate(PROMPT, free, use_tqdm=False)[0].outputs[0].token_ids
        params = [
            SamplingParams(
                max_tokens=900,
                seed=seed,
                logits_transforms={"hurry": True},
                structured_outputs={"json": schema, "disable_any_whitespace": seed % 2 == 0},
            )
            for seed in range(num_seeds)
            for _, schema in schemas
        ]
        outputs = engine.generate([PROMPT] * (len(params) + 1), [*params, free], use_tqdm=False)
    assert outputs.pop().outputs[0].token_ids == alone, "a request without a grammar is not touched by those beside it"
    for output, (name, schema) in zip(outputs, schemas * num_seeds, strict=True):
        completion = output.outputs[0]
        told = name, completion.finish_reason, completion.stop_reason, completion.text[:200]
        assert completion.finish_reason == "stop", told
        value = json.loads(completion.text)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(value)
        battery_counts["generations"] += 1
        battery_counts["tokens"] += len(completion.token_ids)
    assert battery_counts["generations"] == num_schemas * num_seeds
