"""What passes between the server's process and the engine's: structs, in msgpack, one a frame of ``Channel``.

    server -> engine    Start, Generate, Abort, Ask, ReadAdapter, DropAdapter, HandOver
    engine -> server    Started, or Failed; then Outputs, Answer, HandedOver

A message is an array that begins with its type's name, so it holds no code, and a field of another type is refused. The
two sides compare ``VERSION`` in the first messages: they may come from different machines.
"""

from typing import Any

import msgspec

from compiled_llm.text.tokenizer_parts import TokenizerParts

VERSION = 6


class Message(msgspec.Struct, array_like=True, tag=True):
    """The base of all."""


# -- To the engine


class Start(Message, tag="start"):
    """The first message.

    Attributes:
        config: arguments of ``EngineConfig``.
        num_engines: that share this machine's memory, where they run on a CPU.
    """

    version: int
    config: dict[str, Any]
    num_engines: int = 1


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """The arguments of ``LoRARequest``, which are valid."""

    name: str
    path: str


class Generate(Message, tag="generate"):
    """Serve one prompt.

    Attributes:
        sampling: arguments of ``SamplingParams``.
        scored_from: score the tokens from this index on, and generate none.
        adapter: None: the model as it is.
        output_token_ids: of an output that another engine has begun; the pieces have them again.
        kv_transfer_params: as those of ``CompiledEngine.add_request``.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    priority: int = 0
    cache_salt: str = ""
    scored_from: int | None = None
    adapter: AdapterRef | None = None
    output_token_ids: list[int] = []
    kv_transfer_params: dict[str, Any] | None = None


class Abort(Message, tag="abort"):
    """End requests, which get no output any more. Unknown ids are passed over."""

    request_ids: list[str]


class Ask(Message, tag="ask"):
    """What are the engine's statistics? ``number``: of the question, which the answer repeats.

    Attributes:
        resets_prefix_cache: forget cached prompts first.
    """

    number: int
    resets_prefix_cache: bool = False


class ReadAdapter(Message, tag="read adapter"):
    """Read an adapter, which requests are to come for. An ``Answer`` without statistics says what is wrong with it."""

    number: int
    adapter: AdapterRef


class DropAdapter(Message, tag="drop adapter"):
    """Forget an adapter, but for the requests that have it."""

    adapter: AdapterRef


class HandOver(Message, tag="hand over"):
    """End all requests that have not ended, and lay their KV blocks ready for another engine. ``HandedOver`` answers.

    Attributes:
        number: of the question, which the answer repeats.
        seconds: that the blocks may take.
    """

    number: int
    seconds: float


# -- To the server


class Started(Message, tag="started"):
    """The engine serves.

    Attributes:
        tokenizer: None: the model has none.
        capacity: most tokens that a request can ever have; ``limit`` names what sets that.
        max_loras: adapters that can run at once; 0: none are served.
        device: torch's name of its kind.
        sampling: what the model's ``generation_config.json`` suggests, as arguments of ``SamplingParams``.
        token_key: of all that tokens depend on, which another server may have too; empty without a secret to share.
    """

    version: int
    tokenizer: TokenizerParts | None
    capacity: int
    limit: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    max_loras: int
    device: str
    sampling: dict[str, Any]
    token_key: str = ""


class Failed(Message, tag="failed"):
    """The engine did not start. ``kind``: of the error."""

    kind: str
    text: str


# (token id, log-probability, rank, text) of the token itself and then of the most likely ones.
LogprobRow = list[tuple[int, float, int, str | None]]


class Piece(msgspec.Struct, array_like=True):
    """What is new of one continuation."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobRow] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Times(msgspec.Struct, array_like=True):
    """Seconds of a request that has ended; None for what it did not come to."""

    queue: float | None
    prefill: float | None
    decode: float | None
    num_preemptions: int

    @property
    def first(self) -> float | None:
        """Until the first token."""
        return None if self.queue is None or self.prefill is None else self.queue + self.prefill


class Output(msgspec.Struct, array_like=True):
    """What a step gave a request, or all that it has where its ``output_kind`` is "final".

    Attributes:
        pieces: of the continuations that advanced.
        prompt_logprobs: once, if they were asked for; None for tokens that follow nothing.
        times: when it has ended.
        error: why it could not be taken in; ``is_fault``: by no fault of its own.
        engine: the number of the one that it comes from, as the server knows it.
        kv_transfer_params: where its blocks are, when it has ended and they are to be taken.
    """

    request_id: str
    pieces: list[Piece]
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobRow | None] | None = None
    times: Times | None = None
    error: str | None = None
    is_fault: bool = False
    engine: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is the request's last one."""
        return self.times is not None or self.error is not None


class Outputs(Message, tag="outputs"):
    """Sent after each step that gave something; after other steps once a second, so that the engine is seen to work.

    Attributes:
        num_running, num_waiting: requests in the engine.
    """

    outputs: list[Output]
    num_running: int
    num_waiting: int


class Answer(Message, tag="answer"):
    """What was asked for.

    Attributes:
        stats: the fields of ``EngineStats``, and more by name: graphs, seconds at the machine's limits, and names of
            adapters.
        error: why what was asked for besides was not done; ``is_missing``: for want of a file.
    """

    number: int
    stats: dict[str, Any]  # numbers, and lists of counts by position and of names
    error: str | None = None
    is_missing: bool = False


class HandedOver(Message, tag="handed over"):
    """For each request that ``HandOver`` ended: its tokens so far, and where its blocks are (None: nowhere)."""

    number: int
    requests: dict[str, tuple[list[int], dict[str, Any] | None]]


ToEngine = Start | Generate | Abort | Ask | ReadAdapter | DropAdapter | HandOver
ToServer = Started | Failed | Outputs | Answer | HandedOver

encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_for_server = msgspec.msgpack.Decoder(ToServer).decode


def check_version(given: int) -> None:
    if given != VERSION:
        raise ValueError(f"server and engine must speak version {VERSION} of their messages, given {given}")
