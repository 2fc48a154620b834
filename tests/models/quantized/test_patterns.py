"""Regular expressions from configs: as re matches them, and what is refused."""

import re
import time

import pytest

from compiled_llm.models.quantized.patterns import matches

NAMES = ["lm_head", "model.layers.0.mlp.gate", "model.layers.11.mlp.gate_proj", "model.layers.1.self_attn.q_proj", ""]


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head", "lm_head", "re", r".*\.mlp\.gate$", ".*mlp.gate$", r"model\.layers\.(0|11)\..*", ".*gate.*proj.*",
        "model.layers.[0-9].mlp.*", r"^model\.layers\.\d+\.(?:self_attn|mlp)\.\w+$", "(.*)_proj", "(a|model)+.*", "",
        "[^l].*", "a?model.layers", "model.*?1.*", "x*", "(x*)*model", "[-a-m]odel", r".*[\d]\.mlp",
    ],
)  # fmt: skip
def test_as_re(pattern: str) -> None:
    for name in NAMES:
        assert matches(pattern, name) == (re.match(pattern, name) is not None), name


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*(.*)*(.*)*x", "((((((.*)*)*)*)*)*)*y", "(a|a)*b"])
def test_patterns_on_which_backtracking_takes_for_ever(pattern: str) -> None:
    begin = time.monotonic()
    assert not matches(pattern, "a" * 200 + "c")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "a)", "[a", "*a", "a{2}", "a**", "(?=a)", "(?P<n>a)", r"\1", "\\", "a" * 501, "(" * 9 + ")" * 9, r"\b"],
)
def test_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json: the pattern .* of quantization_config"):
        matches(pattern, "model")
