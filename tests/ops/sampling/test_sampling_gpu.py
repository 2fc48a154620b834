"""Sampling on a GPU against the reference: models' sizes, in a CUDA graph, past 2^31 elements."""

import math

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.sampling import token_sampling as sampling
from tests.ops.sampling.sampling_cases import DTYPES, OFF, PATTERNS, SamplingCase, check, extreme_case, grid, make_case
from tests.ops.sampling.test_token_sampling import FILTERS, TEMPERATURES, VOCABULARIES, check_distribution
from tests.ops.sampling.test_triton_sampling import (
    SEARCHES,
    a_top_k_below_1_is_1,
    no_number_gives_no_token,
    noise_has_the_bits_of_the_reference,
    programs_and_neighbours_change_nothing,
    strided_rows_give_the_same,
)

pytestmark = pytest.mark.gpu

OP = torch.ops.compiled_llm.sample_tokens
QWEN, LLAMA, GEMMA = 151936, 128256, 262144


def check_on_gpu(case: SamplingCase) -> Tensor:
    """Its exponentials are not the reference's to the last bit: some tokens may differ, each is shown to be right."""
    return check(case.to("cuda"), OP, most_differences=math.ceil(len(case.logits) / 20))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_grid(vocabulary: int) -> None:
    for _, kwargs in grid((vocabulary,)):
        check_on_gpu(make_case(**kwargs, rows=100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 255, 257, 4096, QWEN])
def test_extremes(vocabulary: int, dtype: torch.dtype) -> None:
    check_on_gpu(extreme_case(vocabulary, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 32, 256])
@pytest.mark.parametrize("vocabulary", [QWEN, LLAMA, GEMMA])
def test_real_sizes(vocabulary: int, rows: int, dtype: torch.dtype) -> None:
    for pattern in ("normal", "peaked"):
        check_on_gpu(make_case(vocabulary, rows=rows, pattern=pattern, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", SEARCHES)
def test_searches_over_many_tokens(name: str, pattern: str, dtype: torch.dtype) -> None:
    """Flat distributions and shared weights, where more depths stay in question than the list holds."""
    searched = {**SEARCHES[name], "temperatures": (0.7, 1.0, 3.0), "dtype": dtype, "pattern": pattern}
    for scale in (0.05, 2.0):
        check_on_gpu(make_case(QWEN, rows=32, scale=scale, **searched))


@pytest.mark.parametrize("pattern", ["normal", "peaked", "few-values"])
def test_programs_and_neighbours_change_nothing(pattern: str) -> None:
    programs_and_neighbours_change_nothing(QWEN, 32, pattern, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(dtype: torch.dtype) -> None:
    strided_rows_give_the_same(dtype, "cuda")


def test_noise_has_the_bits_of_the_reference() -> None:
    noise_has_the_bits_of_the_reference("cuda")


def test_no_number_gives_no_token() -> None:
    no_number_gives_no_token(device="cuda")


def test_beyond_what_is_allowed() -> None:
    a_top_k_below_1_is_1("cuda")


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", FILTERS)
def test_distribution(name: str, temperature: float) -> None:
    check_distribution(FILTERS[name], temperature, "cuda")


def test_a_captured_graph_follows_its_inputs() -> None:
    """Greedy rows, plain ones and every filter, in turn, through one graph."""
    cases = [
        make_case(QWEN, rows=8, dtype=torch.bfloat16, seed=seed, **kwargs).to("cuda")
        for seed, kwargs in enumerate(
            (
                {},
                {"temperatures": (0.0,)},
                {"top_ks": (OFF,), "top_ps": (1.0,), "min_ps": (0.0,), "top_n_sigmas": (0.0,)},
                {"pattern": "peaked", "temperatures": (0.7,), "top_ks": (20,), "top_ps": (0.95,)},
                {"pattern": "few-values", "scale": 0.5, "temperatures": (1.0,), "top_ps": (0.9,)},
                {},
            )
        )
    ]
    static = SamplingCase(*(column.clone() for column in cases[0]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        OP(*static)  # compiles the kernels, which a capture must not do
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = OP(*static)
    for case in cases:
        for buffer, column in zip(static, case, strict=True):
            buffer.copy_(column)
        graph.replay()
        assert torch.equal(tokens, check_on_gpu(case))


def test_greedy_tokens() -> None:
    for dtype in DTYPES:
        logits = make_case(QWEN, pattern="few-values", dtype=dtype).logits
        assert torch.equal(sampling.greedy_tokens(logits.cuda()).cpu(), logits.float().argmax(-1))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(OP.default, tuple(make_case(3000, rows=rows).to("cuda")))


def test_offsets_beyond_32_bits() -> None:
    """Rows that begin 2^30 elements apart."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of GPU memory")
    case = make_case(QWEN, rows=3, dtype=torch.bfloat16).to("cuda")
    logits = torch.empty(3, 2**30, dtype=torch.bfloat16, device="cuda")[:, :QWEN]
    logits.copy_(case.logits)
    assert torch.equal(OP(*case._replace(logits=logits)), check_on_gpu(case))
