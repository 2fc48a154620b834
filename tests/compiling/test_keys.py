"""Keys: what changes the code of a function is in its key, and what differs is said with both values, no digests."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from compiled_llm.compiling import keys
from compiled_llm.compiling.keys import differences, key_of, machine_fields, reason
from compiled_llm.models.config_file import read_config
from compiled_llm.ops.torch_private import DynamicSize, mark_dynamic_size, mark_static_address
from compiled_llm.step.step import logprobs_function, sampler_function, step_function
from tests.families import checkpoint


class Weights(NamedTuple):
    first: torch.Tensor
    others: tuple[torch.Tensor, ...]


def multiply(weights: Weights, factor: int) -> torch.Tensor:
    return weights.first * factor


def key(function: Any = multiply, args: tuple | None = None, **fields: Any) -> dict[str, Any]:
    return key_of("f", function, (Weights(torch.zeros(2, 3), (torch.zeros(4),)), 2) if args is None else args, fields)


def test_an_argument_is_named_by_where_it_is_and_what_it_was() -> None:
    other = Weights(torch.zeros(2, 3), (torch.zeros(4, dtype=torch.bfloat16),))
    assert differences(key(), key(args=(other, 2))) == [
        "weights.others[0] is 'bfloat16[4] of strides (1,) on cpu' and was 'float32[4] of strides (1,) on cpu'"
    ]
    assert differences(key(), key(args=(Weights(torch.zeros(2, 3), (torch.zeros(4),)), 3))) == [
        "factor is '3' and was '2'"
    ]


def test_everything_that_the_compiler_sees_of_an_argument_is_in_the_key() -> None:
    def one(tensor: torch.Tensor) -> dict[str, Any]:
        return key(lambda x: x, (tensor,))

    dynamic, other, fixed = torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    mark_dynamic_size(dynamic, 0, DynamicSize("rows", 3))
    mark_dynamic_size(other, 0, DynamicSize("rows", 2))
    mark_static_address(fixed)
    plain = torch.zeros(4, 4)
    kinds = [plain, plain.T, plain.half(), plain[:2], plain.to("meta"), dynamic, other, fixed]
    made = [keys.digest(one(tensor)) for tensor in kinds]
    assert len(set(made)) == len(made)
    same = key(lambda x, y: x, (plain, plain))
    assert same != key(lambda x, y: x, (plain, plain.clone())), "a tensor that occurs twice"


def test_what_a_function_closes_over_is_named_field_by_field() -> None:
    config = read_config(checkpoint("llama"))
    other = dataclasses.replace(config, rms_norm_eps=0.5)

    def closing_over(config: Any) -> dict[str, Any]:
        return key(lambda x: x * config.rms_norm_eps, (1,))

    found = differences(closing_over(config), closing_over(other))
    assert found == [f"config.rms_norm_eps is '0.5' and was {repr(config.rms_norm_eps)!r}"]


def test_a_setting_of_torch_is_named_with_both_values() -> None:
    fields = machine_fields()
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert differences(fields, machine_fields()) == [
            "torch_config._inductor.config.cpp.simdlen is '256' and was absent"
        ]


def test_a_setting_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = machine_fields()
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    (said,) = differences(fields, machine_fields())
    assert said == "torch_config.$TORCHINDUCTOR_FREEZING is '1' and was absent"


def test_files_of_the_engine_that_changed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step").mkdir()
    monkeypatch.setattr(keys, "_PACKAGE", tmp_path)
    for name in ("a", "b"):
        (tmp_path / "step" / f"{name}.py").write_text("")
    before = machine_fields()
    (tmp_path / "step" / "a.py").write_text("changed = True")
    assert differences(before, machine_fields()) == ["files of the engine have changed: step/a.py"]
    for name in ("b", "c", "d", "e"):
        (tmp_path / "step" / f"{name}.py").write_text("new = True")
    assert differences(before, machine_fields()) == [
        "files of the engine have changed: step/a.py, step/b.py, step/c.py and 2 more"
    ]


def test_a_flag_of_the_cpu_is_named_alone() -> None:
    fields = machine_fields()
    other = fields | {"flags": {name: True for name in fields["flags"] if name != "fma"}}
    assert differences(other, fields) in ([], ["flags.fma is True and was absent"])
    assert differences(fields | {"flags": {"a": True, "b": True}}, fields | {"flags": {"a": True}}) == [
        "flags.b is absent and was True"
    ]


def test_what_follows_from_another_field_is_not_said() -> None:
    """Of another length hundreds of arguments are another, and code that closes over it."""
    args = (Weights(torch.zeros(8, 3), (torch.zeros(4),)), 2)
    before, after = key(max_model_len=1024), key(args=args, max_model_len=2048)
    assert differences(before, after) == ["max_model_len is 2048 and was 1024"]
    changed = key(lambda weights, factor: weights.first + factor)
    assert differences(before, changed | {"max_model_len": 1024}) == ["the function itself has changed"]


def test_a_reason_names_the_first_differences_and_counts_the_others() -> None:
    assert reason(["a", "b"]) == "a; b"
    assert reason(list("abcdefg")) == "a; b; c; d; and 3 more"


# -- What changes a graph of the engine


@dataclasses.dataclass
class Case:
    """Two keys of one function that have to differ in what ``said`` names."""

    before: dict[str, Any]
    after: dict[str, Any]
    said: str


def of_sampler(dtype: torch.dtype = torch.float32, vocab_size: int = 40) -> dict[str, Any]:
    return key(sampler_function, (torch.zeros(4, vocab_size, dtype=dtype),), **machine_fields())


def of_step(**options: Any) -> dict[str, Any]:
    return key(step_function(read_config(checkpoint("llama")), 1, **options), (1,))


def test_dtype_vocabulary_threads_and_exact_are_in_the_keys() -> None:
    threads = torch.get_num_threads()
    before = of_sampler()
    torch.set_num_threads(threads + 1)
    try:
        more_threads = of_sampler()
    finally:
        torch.set_num_threads(threads)
    cases = [
        Case(before, of_sampler(torch.bfloat16), "logits is 'bfloat16[4, 40]"),
        Case(before, of_sampler(vocab_size=41), "logits is 'float32[4, 41]"),
        Case(before, more_threads, f"threads is {threads + 1} and was {threads}"),
        Case(of_step(), of_step(exact=True), "layers[0].exact is True and was False"),
        Case(key(logprobs_function(5), (1,)), key(logprobs_function(20), (1,)), "count is 20 and was 5"),
    ]
    for case in cases:
        assert case.said in "; ".join(differences(case.before, case.after)), case.said
    assert of_sampler() == before
    assert of_step() == of_step()


def test_the_instruction_set_that_torch_may_use_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_sampler()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "none at all")
    assert "cpu_capability is 'none at all' and was " in "; ".join(differences(before, of_sampler()))
