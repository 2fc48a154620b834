"""Unread: what engines gave the requests of one client, until somebody reads it."""

import asyncio
from collections.abc import Callable

from compiled_llm.server.messages import Output, Piece


class EngineEndedError(Exception):
    """The engine's process has ended, and serves nothing any more."""


class RequestAbortedError(Exception):
    """Somebody else than its client has ended a request."""


class Unread:
    """Outputs that were not read yet, one for each engine's request of a client: it grows.

    Attributes:
        at_once: while the reader waits for it, an output is given to this first, which returns whether it took it.
    """

    at_once: Callable[[Output], bool] | None = None

    def __init__(self) -> None:
        self._outputs: dict[str, Output] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._is_waited_for = False

    def put(self, output: Output) -> None:
        if self._is_waited_for and self.at_once is not None:
            try:
                if self.at_once(output):
                    return
            except Exception as error:  # of this request, for its reader
                self.fail(error)
                return
        self._is_waited_for = False
        earlier = self._outputs.get(output.request_id)
        self._outputs[output.request_id] = output if earlier is None else _joined(earlier, output)
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error, self._is_waited_for = error, False
        self._news.set()

    async def next(self) -> Output:
        while not self._outputs and self._error is None:
            self._news.clear()
            self._is_waited_for = True
            try:
                await self._news.wait()
            finally:
                self._is_waited_for = False
        if self._outputs and (self._error is None or isinstance(self._error, EngineEndedError | RequestAbortedError)):
            return self._outputs.pop(next(iter(self._outputs)))
        assert self._error is not None
        raise self._error


def _joined(earlier: Output, later: Output) -> Output:
    """Two deltas as one."""
    pieces = {piece.index: piece for piece in earlier.pieces}
    for piece in later.pieces:
        first = pieces.get(piece.index)
        pieces[piece.index] = piece if first is None else _joined_pieces(first, piece)
    return Output(
        later.request_id,
        list(pieces.values()),
        later.num_cached_tokens,
        earlier.prompt_logprobs or later.prompt_logprobs,
        later.times,
        later.error,
        later.is_fault,
        later.engine,
        later.kv_transfer_params,
    )


def _joined_pieces(first: Piece, second: Piece) -> Piece:
    logprobs = None
    if second.logprobs is not None:
        logprobs = [*(first.logprobs or []), *second.logprobs]
    return Piece(
        first.index,
        first.text + second.text,
        [*first.token_ids, *second.token_ids],
        logprobs,
        second.finish_reason,
        second.stop_reason,
    )
