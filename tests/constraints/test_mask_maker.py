"""MaskMaker: the sampling parameters of a request become masks, one for each of its generations."""

from typing import Any

import numpy as np
import pytest

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.constraints.mask_maker import MaskMaker
from compiled_llm.constraints.token_masks import TokenMask
from compiled_llm.models.config_file import read_config
from compiled_llm.text.tokenizer import Tokenizer

MODEL = read_config(DEMO_MODEL)
VOCAB, EOS = MODEL.vocab_size, MODEL.eos_token_ids[0]
EVERY = set(range(VOCAB))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def maker(tokenizer: Tokenizer) -> MaskMaker:
    return MaskMaker(EngineConfig(), tokenizer, VOCAB, MODEL.eos_token_ids, 32)


def make(maker: MaskMaker, **arguments: Any) -> list[TokenMask | None]:
    params = SamplingParams(**arguments)
    eos = () if params.ignore_eos else MODEL.eos_token_ids
    return maker.masks(params, frozenset([*(params.stop_token_ids or ()), *eos]), False)


def make_one(maker: MaskMaker, **arguments: Any) -> TokenMask:
    (mask,) = make(maker, **arguments)
    assert mask is not None
    return mask


def allowed(mask: TokenMask | None, *output: int) -> set[int]:
    assert mask is not None
    words = mask.words(list(output), len(output))
    assert words is not None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def test_nothing_asked_is_no_mask(maker: MaskMaker) -> None:
    assert make(maker, n=3, stop_token_ids=[9]) == [None, None, None]


def test_a_mask_is_made_of_what_is_asked(maker: MaskMaker) -> None:
    mask = make_one(maker, allowed_token_ids=[3, 9, EOS])
    assert allowed(mask) == {3, 9, EOS}
    assert not mask.needs_last_token
    mask = make_one(maker, min_tokens=2, stop_token_ids=[77])
    assert [allowed(mask, *[5] * count) for count in (0, 1, 2)] == [EVERY - {EOS, 77}] * 2 + [EVERY]
    assert allowed(make_one(maker, min_tokens=2, ignore_eos=True)) == EVERY


def test_bad_words_are_banned_as_they_are_spelled_with_and_without_a_space(
    maker: MaskMaker, tokenizer: Tokenizer
) -> None:
    for word in ("return", " return", "return x", "zzqy", " é"):
        mask = make_one(maker, bad_words=word)
        bare, spaced = tokenizer.encode_piece(word), tokenizer.encode_piece(" " + word.lstrip())
        assert tokenizer.decode(spaced) == " " + word.lstrip()
        for ids in (bare, spaced):
            assert ids[-1] not in allowed(mask, *ids[:-1])
        assert mask.needs_last_token == (max(len(bare), len(spaced)) > 1)
    pieces = ("return", " return", "x", " x")
    gone = EVERY - allowed(make_one(maker, bad_words=["return", "x"]))
    assert gone == {token for piece in pieces for token in tokenizer.encode_piece(piece)}


def test_what_leaves_no_token_to_begin_with_is_refused(maker: MaskMaker, tokenizer: Tokenizer) -> None:
    (x,) = tokenizer.encode_piece("x")
    for params in (
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [x], "bad_words": "x"},
        {"allowed_token_ids": [x, EOS], "bad_words": "x", "min_tokens": 3},
        {"allowed_token_ids": [9], "min_tokens": 1, "stop_token_ids": [9]},
    ):
        with pytest.raises(ValueError, match="leave no token to begin with"):
            make(maker, **params)
    assert allowed(make_one(maker, allowed_token_ids=[x, EOS], bad_words="x")) == {EOS}
    make(maker, allowed_token_ids=[EOS], min_tokens=1, ignore_eos=True)


def test_a_grammar_masks_the_tokens_and_has_a_state_for_each_generation(maker: MaskMaker, tokenizer: Tokenizer) -> None:
    first, second = make(maker, n=2, structured_outputs={"regex": "[ab]c"})
    texts = {tokenizer.decode([token]) for token in allowed(first)}
    assert texts == {"a", "b", *(texts & {"ac", "bc"})}
    assert first is not None
    assert first.needs_last_token
    first.accept(tokenizer.encode_piece("a"))
    assert allowed(first, *tokenizer.encode_piece("a")) != allowed(second)
    with pytest.raises(ValueError, match="does not compile"):
        make(maker, structured_outputs={"regex": "("})


def test_bad_words_are_encoded_once_a_request(
    maker: MaskMaker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 16 continuations and 1,000 long words it took more than a minute."""
    words = [f"word {number}" for number in range(50)]
    encoded: list[list[str]] = []
    encode = tokenizer.encode_pieces
    monkeypatch.setattr(tokenizer, "encode_pieces", lambda texts, split: encoded.append(texts) or encode(texts, split))
    masks = make(maker, n=16, bad_words=words)
    assert len(encoded) == 1
    assert len({id(mask) for mask in masks}) == 16
    assert len({id(mask._always) for mask in masks if mask is not None}) == 1, "what does not change is shared"
    make(maker, bad_words=words)
    assert len(encoded) == 1
    with pytest.raises(ValueError, match=r"bad_words may have 65536 characters at most, .* given 6\d+"):
        make(maker, bad_words=[f"{number:01000}" for number in range(66)])
    assert len(encoded) == 1
