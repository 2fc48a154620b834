"""A stop string ends a text, as one finds it who reads one character, or one token that is not shown, after another."""

import random

import pytest

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.text.output_text import OutputText, StoppableText
from compiled_llm.text.tokenizer import Tokenizer
from tests.tokenizer_pairs import END, USER, write_pair

TOKENS = ["<a>", "<ab>", "b", "<"]


def completed(items: list[tuple[str, bool]], stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The longest stop string that the last of ``items`` (text, is it hidden) completes, and the item it starts with.

    In the text that is shown, or in all of it from the start of an item on.
    """
    found = []
    for start in range(len(items)):
        rest = items[start:]
        whole, shown = "".join(text for text, _ in rest), "".join(text for text, hidden in rest if not hidden)
        found += [(start, stop) for stop in stops if whole == stop]
        if not items[-1][1] and not rest[0][1]:
            found += [(start, stop) for stop in stops if shown == stop]
    return min(found, default=None)


def held_back(items: list[tuple[str, bool]], stops: tuple[str, ...]) -> int:
    """Characters at the end of what is shown that may yet be part of a stop string."""
    most = 0
    for start in range(len(items)):
        rest = items[start:]
        whole, shown = "".join(text for text, _ in rest), "".join(text for text, hidden in rest if not hidden)
        if any(stop.startswith(text) and stop != text for stop in stops for text in (whole, shown) if text):
            most = max(most, len(shown))
    return most


@pytest.mark.parametrize("include", [False, True])
def test_random_texts(include: bool) -> None:
    rng, stopped, with_hidden = random.Random(0), 0, 0
    for _ in range(1000):
        draw = lambda most: "".join(rng.choices(["a", "b", "<", ">", *TOKENS], k=rng.randint(1, most)))  # noqa: E731
        stops = tuple(draw(3) for _ in range(rng.randint(1, 3)))
        text, items, shown = StoppableText(stops, include), [], ""
        for _ in range(rng.randint(1, 14)):
            hidden, may_stop = rng.random() < 0.4, rng.random() < 0.8
            piece = rng.choice(TOKENS) if hidden else draw(2)
            found = text.add_hidden(piece, may_stop) if hidden else text.add(piece, may_stop)
            expected = None
            for item in [(piece, True)] if hidden else [(character, False) for character in piece]:
                items.append(item)
                expected = completed(items, stops) if may_stop else None
                if expected is not None:
                    break
            if expected is not None:
                start, stop = expected
                before = "".join(text for text, hidden in items[:start] if not hidden)
                assert found == stop
                assert shown + text.take(True) == before + (stop if include else "")
                stopped += 1
                with_hidden += any(hidden for _, hidden in items[start:])
                break
            assert found is None
            shown += text.take(False)
            whole = "".join(text for text, hidden in items if not hidden)
            assert shown == whole[: len(whole) - held_back(items, stops)]
        else:
            assert shown + text.take(True) == "".join(text for text, hidden in items if not hidden)
    assert stopped > 400
    assert with_hidden > 100


def test_many_hidden_tokens_are_not_kept_for_good() -> None:
    text = StoppableText(("<a>x",), False)
    for _ in range(20_000):
        assert text.add_hidden("<a>") is None
    assert len(text._hidden) < 10
    assert text.add("x") == "<a>x"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_pair(tmp_path_factory.mktemp("tokenizer"), "gpt2"))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        (f"one two{END} three", END, "one two"),
        (f"one{END} two{END}\nthree", f"{END}\n", "one two"),
        (f"one{END}\n{USER}\n two", f"\n{USER}", "one"),
        (f"one{USER}{END} two", f"{USER}{END}", "one"),
        (f"{END}one", END, ""),
        (f"one{USER} two user", "user", "one two "),  # a part of a special token is no text
        (f"one{END} two |im_", "|im_", "one two "),
        (f"one{USER} two", END, None),
    ],
)
def test_a_special_token_that_is_not_shown_stops(
    text: str, stop: str, before: str | None, streams: bool, tokenizer: Tokenizer
) -> None:
    for include in (False, True):
        params = SamplingParams(stop=stop, include_stop_str_in_output=include)
        output, shown, found = OutputText(tokenizer, [], params), "", None
        for token_id in tokenizer.encode(text):
            found = output.append(token_id)
            shown += output.take(found is not None) if streams or found else ""
            if found:
                break
        assert found == (None if before is None else stop)
        if before is None:
            output.finish()
            assert shown + output.take(True) == "one two"
        else:
            assert shown == before + (stop if include else "")


def test_it_stops_in_a_text_that_shows_it_too(tokenizer: Tokenizer) -> None:
    """Spelled by other tokens, or shown because that is asked for."""
    for ids, skips in ((tokenizer.encode(f"a{END}", True), True), (tokenizer.encode(f"a{END}"), False)):
        output = OutputText(tokenizer, [], SamplingParams(stop=END, skip_special_tokens=skips))
        assert [output.append(token_id) for token_id in ids][-1] == END
        assert output.take(True) == "a"
