"""The messages between server and engine: they come back as they were sent, and others are refused."""

import msgspec
import pytest

from compiled_llm.server.messages import (
    VERSION,
    Abort,
    AdapterRef,
    Answer,
    Ask,
    DropAdapter,
    Failed,
    Generate,
    Output,
    Outputs,
    Piece,
    ReadAdapter,
    Start,
    Started,
    Times,
    check_version,
    decode_for_engine,
    decode_for_server,
    encode,
)
from compiled_llm.text.tokenizer_parts import TokenizerParts

TO_ENGINE = [
    Start(VERSION, {"model": None, "bucket_sizes": [1, 8]}),
    Generate("a", [1, 2], {"temperature": 0.5, "logit_bias": {"5": 1.0}}, 3, "salt"),
    Generate("b", [1], {}, adapter=AdapterRef("name", "path")),
    Abort(["a", "b"]),
    ReadAdapter(3, AdapterRef("name", "path")),
    DropAdapter(AdapterRef("name", "path")),
    Ask(7),
]
PIECE = Piece(1, "text", [5], [[(5, -0.5, 1, "text"), (6, -1.5, 2, None)]], "stop", 5)
TO_SERVER = [
    Started(
        VERSION,
        TokenizerParts(b"{}", {"default": "t"}, {}, ("note",)),
        9,
        "max_model_len",
        9,
        2,
        50,
        16,
        4,
        8,
        "cpu",
        {},
    ),
    Failed("ValueError", "no"),
    Outputs([Output("a", [PIECE], 3, [None, [(1, -2.0, 4, "b")]], Times(0.1, None, None, 0))], 1, 0),
    Answer(7, {"num_steps": 3}),
    Answer(8, {}, "no", is_missing=True),
]


def test_messages_come_back_as_they_were() -> None:
    assert [decode_for_engine(encode(message)) for message in TO_ENGINE] == TO_ENGINE
    assert [decode_for_server(encode(message)) for message in TO_SERVER] == TO_SERVER


@pytest.mark.parametrize(
    "content",
    [b"", b"\xc0", encode(Ask(1))[:-1], msgspec.msgpack.encode(["ask", "1"]), msgspec.msgpack.encode(["none", 1])],
)
def test_others_are_refused(content: bytes) -> None:
    for decode in (decode_for_engine, decode_for_server):
        with pytest.raises(msgspec.DecodeError):
            decode(content)
    with pytest.raises(msgspec.ValidationError):
        decode_for_server(encode(Ask(1)))


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"must speak version {VERSION} of their messages, given {VERSION + 1}"):
        check_version(VERSION + 1)
