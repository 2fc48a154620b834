"""An answer is printed as it comes, and several one after the other."""

import time

from compiled_llm.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_llm.terminal.answer import Answer


def output(*pieces: tuple[int, str, str | None], finished_time: float | None = None) -> RequestOutput:
    completions = [
        CompletionOutput(index, text, [0] * len(text), finish_reason=end, stop_reason="why" if end == "error" else None)
        for index, text, end in pieces
    ]
    metrics = RequestMetrics(1.0, 1.0, 1.5, finished_time)
    return RequestOutput("id", None, [1, 2, 3], completions, finished_time is not None, metrics, num_cached_tokens=2)


def test_pieces_are_printed_as_they_come_and_the_line_is_ended() -> None:
    written: list[str] = []
    answer = Answer(written.append)
    for text, end in (("ab", None), ("", None), ("c\n", None), ("d", "length")):
        answer.take(output((0, text, end), finished_time=3.0 if end else None))
    assert written == ["ab", "c\n", "d", "\n"]
    assert answer.texts == ["abc\nd"]
    assert answer.ends == {0: ("length", None)}
    assert answer.error is None
    expected = "5 tokens in 2.00 s, 2.5 tokens/s, the first after 0.50 s; 3 tokens of prompt, 2 of them cached"
    assert answer.summary == expected


def test_continuations_come_one_after_the_other_with_their_numbers() -> None:
    written: list[str] = []
    answer = Answer(written.append, 3)
    answer.take(output((0, "a", None), (1, "xy", None)))
    assert "".join(written) == "--- 1 of 3 ---\na"
    answer.take(output((1, "z", "stop"), (2, "", "stop")))
    answer.take(output((0, "b", "stop")))
    assert "".join(written) == "--- 1 of 3 ---\nab\n--- 2 of 3 ---\nxyz\n--- 3 of 3 ---\n\n"


def test_an_answer_that_is_cut_off_has_an_end_of_line_and_a_summary() -> None:
    written: list[str] = []
    answer = Answer(written.append)
    assert answer.summary == "no token"
    before = time.monotonic() - 1.0
    answer.take(output((0, "ab", None)))
    answer.end_line()
    assert written[-1] == "\n"
    seconds = float(answer.summary.split(" in ")[1].split(" s")[0])
    assert before - 0.01 <= seconds <= time.monotonic()


def test_an_error_is_told() -> None:
    answer = Answer(lambda piece: None)
    answer.take(output((0, "", "error")))
    assert answer.error == "why"
