"""B9: text that comes in tokens is the text decoded at once, wherever the tokens cut it, and stop strings end it.

The reference knows the bytes of each token and nothing else: it joins them, and Python decodes them.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.text import output_text
from compiled_llm.text.output_text import ContextDecoding, OutputText
from compiled_llm.text.tokenizer import Tokenizer
from tests.battery import sized

REPLACEMENT = "\ufffd"
SPECIALS = ["<s>", "</s>", "<|tool 🔧|>"]
UNITS = [
    *("def ", "return", " the", "  ", "\n", "\t", ".", "Straße", "naïve"),
    *("🚀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇹🇭", "1️⃣", "❤️"),  # skin tone, ZWJ sequences, flag, keycap, variation selector
    *("สวัสดี", "ชาวโลก", "ที่", "น้ำ", "你好", "，世界", "龘", "𠮷", "こんにちは", "가각", "각"),  # the last in jamo
    *("é", "q̣̇", "Z͑ͫ̓a̴", "שָׁלוֹם", "مرحبا", "\u202bab\u202c", "\u200f", "नमस्ते", "Ελλ"),
    *("\ufffd", "\u0000", "\u2581", "\U0010ffff", "<0xE4>"),
]


class Kind(NamedTuple):
    """A tokenizer, and what the reference knows of it.

    Attributes:
        pieces: the bytes of each token. Ids beyond are those of no token, as a model's padded vocabulary has them.
        specials: ids of special tokens.
        byte_ids: of the tokens that are one byte, by their byte.
        has_fallback: whether some tokens are bytes and others text; the library gives up all bytes beside a bad one.
        strips: whether a space at the very begin of a text is cut off.
    """

    tokenizer: Tokenizer
    pieces: list[bytes]
    specials: set[int]
    byte_ids: list[int]
    has_fallback: bool = False
    strips: bool = False

    def whole(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        shown = [i for i in token_ids if i < len(self.pieces) and not (skip_special_tokens and i in self.specials)]
        text = b"".join(self.pieces[token_id] for token_id in shown).decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text


def byte_level_alphabet() -> list[str]:
    """What byte-level tokenizers write for each byte: the character itself if it is printable, or one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def saved(backend: Backend, path: Path) -> Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return Tokenizer(path)


def byte_level(tokenizer: Tokenizer, specials: dict[str, int]) -> Kind:
    """The vocabulary as the library has it, read with a table of our own."""
    values = {character: byte for byte, character in enumerate(byte_level_alphabet())}
    vocabulary = tokenizer._backend.get_vocab(with_added_tokens=False)
    pieces = [b""] * len(vocabulary)
    for token, token_id in vocabulary.items():
        pieces[token_id] = token.encode() if token in specials else bytes(values[character] for character in token)
    byte_ids = [pieces.index(bytes([byte])) for byte in range(256)]
    return Kind(tokenizer, pieces, set(specials.values()), byte_ids)


def demo(path: Path) -> Kind:
    return byte_level(Tokenizer(DEMO_MODEL), {"<|endoftext|>": 0})


def straddling(path: Path) -> Kind:
    """Byte-level, with tokens that end in the middle of one character and begin in the middle of another."""
    alphabet, rng = byte_level_alphabet(), random.Random(1)
    vocabulary = {token: token_id for token_id, token in enumerate(SPECIALS + alphabet)}
    for _ in range(1500):
        data = "".join(rng.choices(UNITS, k=3)).encode()
        begin = rng.randrange(len(data) - 2)
        piece = data[begin : begin + rng.randint(2, 9)]
        vocabulary.setdefault("".join(alphabet[byte] for byte in piece), len(vocabulary))
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return byte_level(saved(backend, path), {token: vocabulary[token] for token in SPECIALS})


def with_its_library(path: Path) -> Kind:
    """As if the bytes of its tokens were not known."""
    kind = straddling(path)
    kind.tokenizer.__dict__["byte_level"] = None
    return kind


def byte_fallback(path: Path, strips: bool) -> Kind:
    """As sentencepiece makes them: '▁' for a space, and bytes for what has no token."""
    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581the", "\u2581def", "ré", "你", "สวั", "ส", "\u0e31", "👍"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIALS, "<unk>", *byte_tokens, *words, "\u2581\u2581", "\ufffd", "\u2581\ufffd", "\u0301"]
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    prepend = [normalizers.Prepend("\u2581")] if strips else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    bytes_of = {token: bytes([byte]) for byte, token in enumerate(byte_tokens)}
    pieces = [bytes_of.get(token, token.replace("\u2581", " ").encode()) for token in tokens]
    byte_ids = [tokens.index(token) for token in byte_tokens]
    return Kind(saved(backend, path), pieces, set(range(len(SPECIALS))), byte_ids, True, strips)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "demo": demo,
    "straddling": straddling,
    "straddling, with its library": with_its_library,
    "fallback": lambda path: byte_fallback(path, strips=False),
    "fallback, stripped": lambda path: byte_fallback(path, strips=True),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    return KINDS[request.param](tmp_path_factory.mktemp("tokenizer"))


def random_ids(rng: random.Random, kind: Kind) -> list[int]:
    """Text as a model writes it, text with faults in it, tokens at random, or bytes at random."""
    num_ids = len(kind.pieces) + 3
    draw = rng.random()
    if draw < 0.1:
        return [rng.choice(kind.byte_ids) for _ in range(rng.randint(1, 30))]
    if draw < 0.3:
        return [rng.randrange(num_ids) for _ in range(rng.randint(1, 40))]
    text = "".join(rng.choices(UNITS, k=rng.randint(1, 12)))
    in_bytes = draw < 0.45
    ids = [kind.byte_ids[byte] for byte in text.encode()] if in_bytes else kind.tokenizer.encode(text)
    if draw < 0.8:
        for _ in range(rng.randint(1, 4)):
            place = rng.randint(0, len(ids))
            ids[place : place + rng.randint(0, 2)] = rng.choices(
                [rng.randrange(num_ids), rng.choice(list(kind.specials)), rng.choice(kind.byte_ids)],
                k=rng.randint(0, 2),
            )
    if draw > 0.7:
        place = rng.randint(0, len(ids))
        ids[place:place] = [rng.choice(list(kind.specials))] * rng.randint(5, 30)
    return ids


def added(kind: Kind, prompt: list[int], output: list[int], skips: bool) -> str:
    """The text that the output adds to the prompt's."""
    before, both = kind.whole(prompt, skips), kind.whole(prompt + output, skips)
    if both.startswith(before):
        return both[len(before) :]
    assert before.endswith(REPLACEMENT), "only a character that was incomplete may change"
    return both[len(before) - 1 :]


def first_stop(text: str, stops: tuple[str, ...], from_end: int) -> tuple[int, str] | None:
    """As one would find it who reads character by character: where it begins, and which it is.

    Args:
        from_end: one that ends before this place is none.
    """
    for end in range(from_end, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return end - len(stop), stop
    return None


def without_begin_of_stop(text: str, stops: tuple[str, ...]) -> str:
    for begin in range(len(text)):
        if any(stop.startswith(text[begin:]) and stop != text[begin:] for stop in stops):
            return text[:begin]
    return text


def random_stops(rng: random.Random, text: str) -> tuple[str, ...]:
    """Pieces of the text, pieces with another end, and pieces that begin or end alike."""
    stops: list[str] = []
    while text and len(stops) < rng.randint(1, 4):
        begin = rng.randrange(len(text))
        piece = text[begin : begin + rng.randint(1, 6)]
        stops.append(rng.choice([piece, piece + "x", piece[1:] or piece, text[max(0, begin - 1) : begin + 2]]))
    return tuple(stops)


def check(
    kind: Kind,
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    counts: Counter[str],
    num_without_stop: int = 0,
) -> None:
    """Token by token: exactly what is decided is shown. The first ``num_without_stop`` tokens may not stop the text."""
    text = OutputText(kind.tokenizer, prompt, params)
    stops, skips = tuple(params.stop or ()), params.skip_special_tokens
    shown, from_end = "", 1
    for count in range(1, len(output) + 2):
        is_end, may_stop = count > len(output), count > num_without_stop
        found = text.finish() if is_end else text.append(output[count - 1], may_stop)
        whole = added(kind, prompt, output[:count], skips)
        decided = whole if is_end else whole.removesuffix(REPLACEMENT)
        counts["replacements"] += decided.count(REPLACEMENT) if is_end else 0
        if not may_stop and not is_end:
            from_end = len(decided) + 1
        expected = first_stop(decided, stops, from_end)
        assert found == (None if expected is None else expected[1])
        shown += text.take(finished=is_end or found is not None)
        if expected is not None:
            begin, stop = expected
            assert shown == decided[: begin + (len(stop) if params.include_stop_str_in_output else 0)]
            counts["stop strings"] += 1
            return
        assert shown == (decided if is_end else without_begin_of_stop(decided, stops))
        counts["held back"] += len(shown) < len(decided)


@sized("num_sequences", 100, 5_000)
def test_random_sequences(kind: Kind, num_sequences: int, battery_counts: Counter[str]) -> None:
    rng = random.Random(0)
    for number in range(num_sequences):
        ids = random_ids(rng, kind)
        place = rng.choice([0, rng.randint(0, len(ids))])
        prompt, output = ids[:place], ids[place:]
        skips = rng.random() < 0.7
        whole = added(kind, prompt, output, skips)
        stops = random_stops(rng, whole) if rng.random() < 0.4 else ()
        params = SamplingParams(stop=stops, include_stop_str_in_output=rng.random() < 0.3, skip_special_tokens=skips)
        try:
            check(kind, prompt, output, params, battery_counts, num_without_stop=rng.choice([0, 0, 3]))
        except AssertionError as error:
            error.add_note(f"in sequence {number}: {prompt}, {output}, {params}")
            raise
        both = kind.whole(ids, skips)
        if REPLACEMENT not in both or not kind.has_fallback:
            assert both == kind.tokenizer.decode(ids, skips), "the reference is wrong"
            battery_counts["as the library decodes"] += 1
        battery_counts["prompts cut in a character"] += kind.whole(prompt, skips).endswith(REPLACEMENT)
        battery_counts["characters"] += len(whole)
    battery_counts["sequences"] += num_sequences
    for what, count in battery_counts.items():
        assert count > 0, what


@sized("num_sequences", 30, 5_000)
def test_many_tokens_at_once_are_one_after_the_other(
    kind: Kind, num_sequences: int, monkeypatch: pytest.MonkeyPatch, battery_counts: Counter[str]
) -> None:
    """Pieces of any length between single tokens. After each, all that is decided is shown, and no more."""
    rng, at_once = random.Random(3), ContextDecoding._add_at_once
    monkeypatch.setattr(output_text, "_TOKENS_AT_ONCE", 20)

    def counted(text: ContextDecoding, token_ids: list[int]) -> str | None:
        piece = at_once(text, token_ids)
        battery_counts["not at once" if piece is None else "at once"] += 1
        return piece

    monkeypatch.setattr(ContextDecoding, "_add_at_once", counted)
    for number in range(num_sequences):
        ids = [token_id for _ in range(rng.randint(1, 4)) for token_id in random_ids(rng, kind)]
        place = rng.choice([0, rng.randint(0, len(ids))])
        prompt, output, skips = ids[:place], ids[place:], rng.random() < 0.7
        text, shown, count = OutputText(kind.tokenizer, prompt, SamplingParams(skip_special_tokens=skips)), "", 0
        while count < len(output):
            piece = output[count : count + rng.choice([1, 2, 5, 30])]
            count += len(piece)
            if len(piece) == 1:
                text.append(piece[0])
            else:
                text.extend(piece)
            shown += text.take(finished=False)
            whole = added(kind, prompt, output[:count], skips)
            assert shown == whole.removesuffix(REPLACEMENT), f"in sequence {number}: {prompt}, {output}"
        text.finish()
        assert shown + text.take(finished=True) == added(kind, prompt, output, skips)
    if kind.tokenizer.byte_level is None:
        assert battery_counts["at once"] > battery_counts["not at once"] / 10 > 0
    else:
        assert not battery_counts, "the bytes of a token are known"


@pytest.mark.parametrize("include", [False, True], ids=["without", "with"])
@sized("num_stops", 40, 500)
def test_stop_strings_at_every_split(
    num_stops: int, include: bool, tmp_path: Path, battery_counts: Counter[str]
) -> None:
    """The text in two tokens, cut at each byte; in single bytes; in tokens that hold two stop strings."""
    rng, alphabet = random.Random(2), byte_level_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}

    def token(data: bytes) -> list[int]:
        return [vocabulary.setdefault("".join(alphabet[byte] for byte in data), len(vocabulary))] if data else []

    cases: list[tuple[list[list[int]], SamplingParams]] = []
    for _ in range(num_stops):
        stop, before, behind = ("".join(rng.choices(UNITS, k=k)) for k in (rng.randint(1, 3), 2, 2))
        others = rng.sample([stop + "x", stop[1:], stop[:1] * 2, before[-1] + stop, stop[-1] + behind[0], "never"], 2)
        stops = [stop, *filter(None, others)]
        rng.shuffle(stops)
        data = (before + stop + behind).encode()
        cuts = [token(data[:place]) + token(data[place:]) for place in range(len(data) + 1)]
        cases.append(([*cuts, list(data)], SamplingParams(stop=stops, include_stop_str_in_output=include)))
    backend = Backend(models.WordLevel(vocabulary, unk_token="!"))
    backend.decoder = decoders.ByteLevel()
    kind = byte_level(saved(backend, tmp_path), {})

    for splits, params in cases:
        for ids in splits:
            check(kind, [], ids, params, battery_counts)
        battery_counts["splits"] += len(splits)
    assert battery_counts["stop strings"] == battery_counts["splits"]
    assert battery_counts["held back"] > battery_counts["splits"] / 2


@pytest.mark.parametrize("what", ["bytes that fit nothing", "special tokens", "spaces", "text"])
def test_no_token_costs_more_than_the_one_before(kind: Kind, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long there is nothing to show: what is decoded again stays short, and what is shown lags by little."""
    lengths: list[int] = []
    decode = kind.tokenizer.decode

    def counting(token_ids: list[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids, skip_special_tokens)

    data = {"bytes that fit nothing": b"\xff\xe4", "spaces": b" ", "text": "a你👍".encode()}.get(what)
    ids = [kind.byte_ids[byte] for byte in data] if data else [min(kind.specials)]
    ids = ids * (400 // len(ids))
    monkeypatch.setattr(kind.tokenizer, "decode", counting)
    text = OutputText(kind.tokenizer, [], SamplingParams())
    shown = ""
    for count, token_id in enumerate(ids, 1):
        text.append(token_id)
        shown += text.take(finished=False)
        assert len(kind.whole(ids[:count], True)) - len(shown) <= 1
    assert max(lengths, default=0) < 20
    assert len(lengths) < 20 * len(ids)
    text.finish()
    assert shown + text.take(finished=True) == kind.whole(ids, True)
