"""Changes of logits: each against transformers or its formula, their order, and rows that ask for nothing."""

import math
import sys
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from compiled_llm.api.sampling_params import MAX_BIASES
from compiled_llm.constraints.token_masks import TokenMask, num_mask_words
from compiled_llm.step.logits import LogitsInput, penalised, process_logits, unpacked
from compiled_llm.step.logits_transforms import Field, LogitsContext, LogitsTransform, load_transforms

CPU = torch.device("cpu")
VOCAB = 45  # no multiple of 32
PROMPT, OUTPUT = [3, 7, 7, 44, 0], [7, 9, 9, 9, 31, 32]


def counted(prompt: Sequence[int], output: Sequence[int], vocab_size: int = VOCAB) -> Tensor:
    """A row of ``LogitsContext.token_counts``."""
    row = torch.zeros(vocab_size)
    row[list(set(prompt))] = 0.5
    for token, count in Counter(output).items():
        row[token] += count
    return row


def wanted(rows: int, vocab_size: int = VOCAB, **changes: Tensor) -> LogitsInput:
    """What asks for nothing, but for ``changes``. Row i has row i of the counts."""
    off = LogitsInput(
        row=torch.arange(rows),
        is_due=torch.ones(rows),
        presence_penalty=torch.zeros(rows),
        frequency_penalty=torch.zeros(rows),
        repetition_penalty=torch.ones(rows),
        bias_ids=torch.zeros(rows, MAX_BIASES, dtype=torch.int64),
        biases=torch.zeros(rows, MAX_BIASES),
        allowed=torch.full((rows, num_mask_words(vocab_size)), -1, dtype=torch.int32),
        fields=(),
    )
    return off._replace(**changes)


def changed(
    logits: Tensor, asked: LogitsInput, counts: Tensor | None = None, transforms: tuple[LogitsTransform, ...] = ()
) -> Tensor:
    counts = torch.zeros_like(logits, dtype=torch.float32) if counts is None else counts
    return process_logits(logits, asked, torch.zeros(len(logits), dtype=torch.int32), counts, transforms)


def biased(rows: Sequence[Mapping[int, float]]) -> dict[str, Tensor]:
    ids, biases = torch.zeros(len(rows), MAX_BIASES, dtype=torch.int64), torch.zeros(len(rows), MAX_BIASES)
    for row, asked in enumerate(rows):
        items = list((asked or {0: 0.0}).items())
        items += items[:1] * (MAX_BIASES - len(items))  # what is left over says the first again
        ids[row], biases[row] = torch.tensor([i for i, _ in items]), torch.tensor([bias for _, bias in items])
    return {"bias_ids": ids, "biases": biases}


# -- Each change by itself


@pytest.mark.parametrize("penalty", [0.01, 0.5, 1.2, 3.0, 100.0])
def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output(penalty: float) -> None:
    logits = torch.randn(2, VOCAB) * 5
    counts = torch.stack([counted(PROMPT, OUTPUT), counted([1, 2, 44], [])])
    found = changed(logits, wanted(2, repetition_penalty=torch.full((2,), penalty)), counts)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row, ids in enumerate([PROMPT + OUTPUT, [1, 2, 44]]):
        torch.testing.assert_close(found[row : row + 1], processor(torch.tensor([ids]), logits[row : row + 1]))
        others = [token for token in range(VOCAB) if token not in ids]
        assert torch.equal(found[row, others], logits[row, others])
    assert penalty == 1 or not torch.equal(found, logits)


def test_presence_and_frequency_penalties_by_their_formulas() -> None:
    """They count the output alone; that the prompt has a token too changes nothing."""
    logits = torch.randn(3, VOCAB)
    rows = [(PROMPT, OUTPUT, 0.7, 0.0), (PROMPT, OUTPUT, 0.0, -1.3), ([9, 9], [5] * 20 + [9], -2.0, 2.0)]
    found = changed(
        logits,
        wanted(
            3,
            presence_penalty=torch.tensor([row[2] for row in rows]),
            frequency_penalty=torch.tensor([row[3] for row in rows]),
        ),
        torch.stack([counted(prompt, output) for prompt, output, *_ in rows]),
    )
    for row, (_, output, presence, frequency) in enumerate(rows):
        for token in range(VOCAB):
            count = output.count(token)
            expected = logits[row, token].item() - (presence if count else 0) - frequency * count
            assert found[row, token].item() == pytest.approx(expected, abs=1e-5), token


def test_bias_is_that_of_transformers() -> None:
    logits = torch.randn(2, VOCAB)
    rows: list[dict[int, float]] = [{0: -100.0, 44: 100.0, 31: 0.5, 32: -0.25}, {0: 3.5}]
    found = changed(logits, wanted(2, **biased(rows)))
    for row, biases in enumerate(rows):
        processor = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
        assert torch.equal(found[row : row + 1], processor(torch.tensor([[1]]), logits[row : row + 1]))


def test_as_many_biases_as_there_may_be() -> None:
    logits = torch.randn(1, 1000)
    found = changed(logits, wanted(1, 1000, **biased([{token: 1 + token / 100 for token in range(700, 1000)}])))
    torch.testing.assert_close(found[0, 700:] - logits[0, 700:], 1 + torch.arange(700, 1000) / 100)
    assert torch.equal(found[0, :700], logits[0, :700])


def test_bad_words_are_banned_as_transformers_bans_them() -> None:
    words = [(5,), (44,), (1, 2), (7, 8, 9), (7, 8, 10), (2, 2), (31, 32, 33, 34)]
    mask = TokenMask(VOCAB, bad_words=words)
    processor = NoBadWordsLogitsProcessor([list(word) for word in words])
    logits = torch.randn(1, VOCAB)
    outputs = [[0], [1], [2], [1, 2], [7], [7, 8], [0, 7, 8], [8, 7], [31, 32, 33], [32, 33], [3, 1], [1, 3]]
    for output in outputs:
        words_ = torch.from_numpy(mask.words(output, len(output)).copy())[None]
        found = changed(logits, wanted(1, allowed=words_))
        assert torch.equal(found, processor(torch.tensor([output]), logits)), output


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 63, 64, 65, 100, 4096])
def test_masks_of_any_vocabulary(vocab_size: int) -> None:
    words = torch.randint(-(2**31), 2**31, (3, num_mask_words(vocab_size))).int()
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    mask = unpacked(words, vocab_size)
    assert mask.dtype == torch.bool
    assert mask.tolist() == bits.tolist()
    logits = torch.randn(3, vocab_size)
    found = changed(logits, wanted(3, vocab_size, allowed=words))
    assert torch.equal(found.isneginf(), ~mask)
    assert torch.equal(found[mask], logits[mask])


def test_words_of_a_mask_are_as_many_as_it_takes() -> None:
    assert [num_mask_words(size) for size in (1, 32, 33, 64, 65, 151_936)] == [1, 1, 2, 2, 3, 4748]


# -- Rows that ask for nothing


class Scale(LogitsTransform):
    """Logits times a number; the likeliest token so far is spared."""

    name = "scale"
    fields: Mapping[str, Field] = {"factor": Field((), torch.float32, 1.0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        return {"factor": float(argument)}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        return logits * fields["factor"][:, None]


SCALE = Scale()


def all_and_nothing() -> tuple[Tensor, LogitsInput, Tensor]:
    """Even rows ask for everything and odd ones for nothing, though odd ones have counts of an earlier request."""
    rows = 6
    asks = torch.arange(rows) % 2 == 0

    def either(value: float, off: float) -> Tensor:
        return torch.where(asks, value, off)

    logits = torch.randn(rows, VOCAB) * 20
    logits[:, [3, 20]] = torch.tensor([-math.inf, 3e38])
    biases: list[dict[int, float]] = [{0: 7.0, 5: -3.0} if ask else {} for ask in asks.tolist()]
    words = torch.randint(-(2**31), 2**31, (rows, num_mask_words(VOCAB))).int()
    asked = wanted(
        rows,
        presence_penalty=either(1.5, 0),
        frequency_penalty=either(-0.5, 0),
        repetition_penalty=either(1.7, 1),
        allowed=torch.where(asks[:, None], words, -1),
        fields=((either(0.25, 1),),),  # type: ignore[arg-type]
        **biased(biases),
    )
    return logits, asked, torch.stack([counted(PROMPT, OUTPUT)] * rows)


def bits(logits: Tensor) -> list[list[int]]:
    return logits.view(torch.int32).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_ask_for_nothing_come_out_bit_for_bit(dtype: torch.dtype) -> None:
    logits, asked, counts = all_and_nothing()
    logits = logits.clamp(max=6e4).to(dtype)
    found = changed(logits, asked, counts, (SCALE,))
    assert found.dtype == torch.float32
    assert bits(found[1::2]) == bits(logits[1::2].float())
    assert all(before != after for before, after in zip(bits(found[::2]), bits(logits[::2].float()), strict=True))
    alone = wanted(6)
    assert bits(changed(logits, alone, counts)) == bits(logits.float())


@pytest.mark.battery  # in the ordinary run e2e/test_sampling.py has it compiled, with all else
def test_compiled_they_do_too_and_the_others_are_as_uncompiled() -> None:
    logits, asked, counts = all_and_nothing()
    position = torch.zeros(len(logits), dtype=torch.int32)
    torch.compiler.reset()
    compiled = torch.compile(process_logits, fullgraph=True)
    found = compiled(logits, asked, position, counts, (SCALE,))
    assert bits(found[1::2]) == bits(logits[1::2])
    torch.testing.assert_close(found, process_logits(logits, asked, position, counts, (SCALE,)))


def test_rows_read_their_own_counts_wherever_they_stand() -> None:
    logits = torch.randn(3, VOCAB)
    counts = torch.stack([counted([], [token]) for token in range(5)])
    asked = wanted(3, row=torch.tensor([4, 0, 2]), presence_penalty=torch.ones(3))
    found = changed(logits, asked, counts)
    assert (logits - found).nonzero().tolist() == [[0, 4], [1, 0], [2, 2]]


# -- Order


class SeenByTransform(LogitsTransform):
    """Adds 100 to token 2 of rows that ask, and keeps what it was given."""

    name = "seen"
    fields: Mapping[str, Field] = {"on": Field((), torch.float32, 0.0)}

    def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
        return {"on": 1.0}

    def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
        self.logits, self.context = logits.clone(), context
        return logits + 100 * fields["on"][:, None] * (torch.arange(logits.shape[1]) == 2)


def test_bias_comes_first_then_penalties_then_transforms_in_their_order_then_the_mask() -> None:
    logits, counts = torch.tensor([[-1.0, 1.0, 2.0]]), torch.tensor([[1.5, 3.0, 0.0]])
    seen = SeenByTransform()
    asked = wanted(
        1,
        3,
        repetition_penalty=torch.tensor([2.0]),
        frequency_penalty=torch.tensor([0.125]),
        presence_penalty=torch.tensor([1.0]),
        allowed=torch.tensor([[0b011]], dtype=torch.int32),
        fields=((torch.tensor([1.0]),), (torch.tensor([0.5]),)),
        **biased([{0: 5.0}]),
    )
    position = torch.tensor([17], dtype=torch.int32)
    found = process_logits(logits, asked, position, counts, (seen, SCALE))
    # The bias made token 0 positive, so that the repetition penalty divided it; then the others were subtracted.
    penalties = [4.0 / 2 - 0.125 - 1.0, 1.0 / 2 - 3 * 0.125 - 1.0]
    assert seen.logits.tolist() == [[*penalties, 2.0]]
    assert found.tolist() == [[penalties[0] / 2, penalties[1] / 2, -math.inf]]
    assert seen.context.position.tolist() == [17]
    assert seen.context.token_counts.tolist() == counts.tolist()
    assert torch.equal(penalised(logits + torch.tensor([5.0, 0, 0]), counts, asked), seen.logits)


def test_banned_logits_stay_banned_by_every_penalty() -> None:
    logits = torch.full((2, 4), -math.inf)
    logits[:, 0] = 1.0
    everything = wanted(
        2,
        4,
        repetition_penalty=torch.tensor([0.01, 100.0]),
        frequency_penalty=torch.tensor([-2.0, 2.0]),
        presence_penalty=torch.tensor([2.0, -2.0]),
        **biased([{1: 100.0}, {2: -100.0}]),
    )
    found = changed(logits, everything, torch.full((2, 4), 9.5))
    assert found[:, 1:].isneginf().all()
    assert found[:, 0].isfinite().all()


# -- Loading transforms


def test_a_transform_as_object_class_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("transforms_of_a_user")
    module.TheClass, module.the_object = Scale, SCALE  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for item in (SCALE, Scale, "transforms_of_a_user:TheClass", "transforms_of_a_user:the_object"):
        (found,) = load_transforms([item], VOCAB, CPU)
        assert isinstance(found, Scale)
    seen = SeenByTransform()
    assert load_transforms([seen, Scale], VOCAB, CPU)[0] is seen
    assert load_transforms([], VOCAB, CPU) == ()
    assert seen.logits.shape == (2, VOCAB)


def made(**attributes: Any) -> type[LogitsTransform]:
    """A class like ``Scale`` with other attributes."""
    return type("Made", (Scale,), attributes)


def call(function: Any) -> Any:
    return lambda self, logits, fields, context: function(logits)


REFUSED: dict[str, tuple[list[Any], str]] = {
    "two of a name": ([Scale, SCALE], r"different names, given \['scale', 'scale'\]"),
    "no module": (["no_such_module:Scale"], "'no_such_module:Scale' must be 'module:name'.*no_such_module"),
    "no such name": (["math:Scale"], "'math:Scale' must be 'module:name'"),
    "no name": (["math"], "'math' must be 'module:name'"),
    "no name behind the colon": (["math:"], "'math:' must be 'module:name'"),
    "no module before the colon": ([":Scale"], "':Scale' must be 'module:name'"),
    "a relative module": (["..models:Scale"], "'..models:Scale' must be 'module:name'"),
    "something else by name": (["math:sin"], "must hold LogitsTransform objects or 'module:name', given <built-in"),
    "a number": ([5], "must hold LogitsTransform objects or 'module:name', given 5"),
    "another class": ([dict], "must hold LogitsTransform objects or 'module:name', given {}"),
    "a function": ([lambda logits: logits], "must hold LogitsTransform objects"),
    "an empty name": ([made(name="")], "Made must have a name"),
    "a name that is none": ([made(name=5)], "Made must have a name"),
    "no fields by name": ([made(fields=[Field((), torch.float32, 1.0)])], "'scale' must have fields, a dict of Field"),
    "a field that is none": (
        [made(fields={"x": torch.float32})],
        "'scale' must have fields.*given {'x': torch.float32}",
    ),
    "a field of bfloat16": (
        [made(fields={"factor": Field((), torch.bfloat16, 1.0)})],
        "'scale' must have fields.*each of a dtype that numpy has, given {'factor'",
    ),
    "a field of fp8": ([made(fields={"factor": Field((), torch.float8_e4m3fn, 1.0)})], "a dtype that numpy has, given"),
    "changes unasked": ([made(__call__=call(lambda x: x + 1))], "'scale' must return float32 logits of the same shape"),
    "changes one token": (
        [made(__call__=call(lambda x: x.index_fill(1, torch.tensor([VOCAB - 1]), 0.0)))],
        "leave the rows as they are whose fields have their defaults",
    ),
    "changes by its default": ([made(fields={"factor": Field((), torch.float32, 2.0)})], "leave the rows as they are"),
    "another dtype": ([made(__call__=call(lambda x: x.double()))], "'scale' must return float32"),
    "another shape": ([made(__call__=call(lambda x: x[:, :-1]))], "'scale' must return float32 logits of the same sh"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    items, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"logits_transforms.*{message}"):
        load_transforms(items, VOCAB, CPU)


def test_a_transform_without_a_name_or_fields_is_refused() -> None:
    class Nameless(LogitsTransform):
        def row(self, argument: Any, vocab_size: int) -> Mapping[str, Any]:
            raise NotImplementedError

        def __call__(self, logits: Tensor, fields: Mapping[str, Tensor], context: LogitsContext) -> Tensor:
            return logits

    class Fieldless(Nameless):
        name = "fieldless"

    with pytest.raises(ValueError, match="Nameless must have a name"):
        load_transforms([Nameless], VOCAB, CPU)
    with pytest.raises(ValueError, match="'fieldless' must have fields"):
        load_transforms([Fieldless], VOCAB, CPU)
