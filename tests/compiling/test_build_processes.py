"""Messages between a start and the processes that compile for it."""

import io

import pytest

from compiled_llm.compiling.build_processes import receive, send


def test_a_message_cut_short_is_the_end_of_its_sender() -> None:
    stream = io.BytesIO()
    send(stream, ("a", 1))
    whole = stream.getvalue()
    assert receive(io.BytesIO(whole)) == ("a", 1)
    for length in (0, 5, len(whole) - 1):
        with pytest.raises(EOFError):
            receive(io.BytesIO(whole[:length]))
