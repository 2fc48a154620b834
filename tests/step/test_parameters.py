"""The table of sampling parameters: it covers what the graphs read, and its neutral values change nothing."""

import torch

from compiled_llm.api.sampling_params import MAX_BIASES, SamplingParams
from compiled_llm.step.logits import LogitsInput
from compiled_llm.step.parameters import LOGITS, SAMPLING
from compiled_llm.step.sampling import SamplingInput

VOCAB = 50
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": VOCAB,
    "min_p": 0.0,
    "top_n_sigma": 0.0,
    "seed": 7,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bias_ids": [0] * MAX_BIASES,
    "biases": [0.0] * MAX_BIASES,
}


def test_the_table_names_what_the_graphs_read() -> None:
    assert {line.name for line in SAMPLING} == {*SamplingInput._fields} - {"position"}
    assert {line.name for line in LOGITS} == {*LogitsInput._fields} - {"row", "is_due", "allowed", "fields", "drafts"}


def test_values_of_a_request_that_asks_for_nothing_are_neutral() -> None:
    lines = (*SAMPLING, *LOGITS)
    assert {line.name: line.value(SamplingParams(), 7, VOCAB) for line in lines} == NEUTRAL


def test_values_fit_the_dtype_and_shape_of_their_line() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, presence_penalty=1, logit_bias={4: 2.0, 9: -1.0})
    for line in (*SAMPLING, *LOGITS):
        row = torch.tensor(line.value(params, -5, VOCAB)).to(line.dtype)
        assert row.shape == line.shape, line.name
    values = {line.name: line.value(params, -5, VOCAB) for line in LOGITS}
    assert dict(zip(values["bias_ids"], values["biases"], strict=True)) == {4: 2.0, 9: -1.0}
