"""A request of the server that has not ended: what its client had of it, and how it goes on in another engine."""

import asyncio
import dataclasses
import functools
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from compiled_llm.routing.router import RoutedPrompt
from compiled_llm.server.messages import Generate, Output, Piece
from compiled_llm.server.unread import Unread

_EXPECTED_TOKENS = 256  # of an output that may be longer, or as long as it likes
# A prompt in an engine of the role "prefill".
_PROMPT_ONLY = {"temperature": 0.0, "max_tokens": 1, "detokenize": False, "output_kind": "final"}


@dataclasses.dataclass
class _Had:
    """What the client of a request had, or will read, of one continuation; and what of that is still to come again."""

    tokens: int = 0
    characters: int = 0
    again_tokens: int = 0
    again_characters: int = 0
    has_ended: bool = False


@dataclasses.dataclass(eq=False)
class OpenRequest:
    """A request that has not ended.

    Attributes:
        asked: itself.
        prompt: None where there is nothing to choose.
        unread: of its client.
        num_expected: tokens of its output, about.
        engine: the one that has it; None: none has more than its prompt.
        num_left: tokens that this has still to compute for it, about.
        prompt_engine: one of the role "prefill" that computes its prompt; None: none does.
        prompt_left: as ``num_left``, of this.
        lease: what the blocks of the prompt are called there.
        token_ids: of its output that its client has had, or will read; where it has one continuation.
        known_ids: these, or more of them, which an engine that goes on begins with.
        had: by continuation.
        late: while an engine of the role "prefill" has its prompt: when that has taken too long.
        elsewhere: while another server has it: what brings its outputs from there.
        is_second: the engine that had it before has died.
    """

    asked: Generate
    prompt: RoutedPrompt | None
    unread: Unread
    num_expected: int
    engine: int | None = None
    num_left: int = 0
    prompt_engine: int | None = None
    prompt_left: int = 0
    lease: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    known_ids: list[int] = dataclasses.field(default_factory=list)
    had: dict[int, _Had] = dataclasses.field(default_factory=dict)
    late: asyncio.TimerHandle | None = None
    elsewhere: "asyncio.Task[None] | None" = None
    has_prompt_logprobs: bool = False
    is_begun: bool = False
    is_second: bool = False

    @functools.cached_property
    def is_one(self) -> bool:
        """Whether its output is one continuation, which another engine can go on with."""
        return self.asked.scored_from is None and self.asked.sampling.get("n", 1) == 1

    def message(self, params: dict[str, Any] | None) -> Generate:
        """Itself, from where its tokens are known. ``params``: where its blocks are."""
        if not self.known_ids and params is None:
            return self.asked
        more = {"output_token_ids": self.known_ids or self.asked.output_token_ids}
        params = params or self.asked.kv_transfer_params
        return msgspec.structs.replace(self.asked, **more, kv_transfer_params=params)

    def prompt_message(self) -> Generate:
        """Its known tokens as a prompt, whose blocks another engine is to take, under a new ``lease``."""
        tokens = [*self.asked.prompt_token_ids, *(self.known_ids or self.asked.output_token_ids)]
        self.lease = secrets.token_hex(32)
        params = {"do_remote_decode": True, "remote_request_id": self.lease}
        more = {"prompt_token_ids": tokens, "sampling": _PROMPT_ONLY, "kv_transfer_params": params}
        return msgspec.structs.replace(self.asked, **more, output_token_ids=[])

    def begin_again(self, token_ids: Sequence[int] = ()) -> None:
        """Another engine has it from now on, which gives all of its output once more.

        ``token_ids``: its output, as the engine knew it that had it before.
        """
        self.is_begun, self.known_ids = False, list(self.token_ids)
        # Of tokens that nobody has had yet nothing else is known.
        if self.is_one and self.asked.sampling.get("logprobs") is None and len(token_ids) > len(self.known_ids):
            self.known_ids = list(token_ids)
        for had in self.had.values():
            had.again_tokens, had.again_characters = had.tokens, had.characters

    def take(self, output: Output) -> Output:
        """``output`` without what came before."""
        pieces = []
        for piece in output.pieces:
            had = self.had.get(piece.index)
            if had is None:
                had = self.had[piece.index] = _Had()
            if had.has_ended:
                continue
            if had.again_tokens or had.again_characters:
                piece = _without_again(piece, had)
                if not (piece.token_ids or piece.text or piece.finish_reason):
                    continue
            had.tokens += len(piece.token_ids)
            had.characters += len(piece.text)
            had.has_ended = piece.finish_reason is not None
            if self.is_one:
                self.token_ids += piece.token_ids
            pieces.append(piece)
        output.pieces = pieces
        if output.prompt_logprobs is not None:
            output.prompt_logprobs = None if self.has_prompt_logprobs else output.prompt_logprobs
            self.has_prompt_logprobs = True
        return output


def _without_again(piece: Piece, had: _Had) -> Piece:
    """What of a piece did not come before."""
    tokens, characters = min(had.again_tokens, len(piece.token_ids)), min(had.again_characters, len(piece.text))
    had.again_tokens, had.again_characters = had.again_tokens - tokens, had.again_characters - characters
    logprobs = None if piece.logprobs is None else piece.logprobs[tokens:]
    new = {"text": piece.text[characters:], "token_ids": piece.token_ids[tokens:], "logprobs": logprobs}
    return msgspec.structs.replace(piece, **new)


def num_expected_tokens(request: Generate) -> int:
    """Of a request's output, about."""
    n, most = request.sampling.get("n", 1), request.sampling.get("max_tokens")
    return 0 if request.scored_from is not None else n * min(most or _EXPECTED_TOKENS, _EXPECTED_TOKENS)
