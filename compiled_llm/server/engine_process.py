"""The process of the engine: requests come in as messages, a step runs, what it gave goes out.

    python -P -m compiled_llm.server.engine_process    its standard input is the socket to the server

The main thread steps. Another one reads messages; a few more prepare requests whose grammar or bad words may take long,
and read adapters, while the others are served. The process ends when the server closes the socket, or is gone.
"""

import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, redirect_stderr
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from compiled_llm.api.config import KV_KEY_VARIABLE, EngineConfig
from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.checkpoint.generation_config import suggested_sampling
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.engine.admission import PreparedRequest
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.engine.failures import WorkerFailedError
from compiled_llm.engine.hand_over import token_key
from compiled_llm.engine.turns import commands_of_turn
from compiled_llm.server.messages import (
    VERSION,
    Abort,
    AdapterRef,
    Answer,
    Ask,
    DropAdapter,
    Failed,
    Generate,
    HandedOver,
    HandOver,
    LogprobRow,
    Output,
    Outputs,
    Piece,
    ReadAdapter,
    Start,
    Started,
    Times,
    ToServer,
    check_version,
    decode_for_engine,
    encode,
)
from compiled_llm.system.child_process import Channel, own_channel
from compiled_llm.system.process import UnwaitingStream
from compiled_llm.system.resources import granted_cores
from compiled_llm.text.prompts import EncodedPrompt, Prompt, ScoredPrompt

_PREPARING_THREADS = 8
_HEARTBEAT_SECONDS = 1.0
# Where the engine computes on all cores, the work of HTTP takes time from steps. An event of a stream takes 0.05 to 0.2
# ms, so steps that are shorter than the first, and the second for each request, share their events. Nobody waits longer
# than the third.
_DELTA_SECONDS = 0.006, 0.002, 0.05


class _Prepared(NamedTuple):
    """A request that was prepared in another thread, or what is wrong with it."""

    asked: Generate
    request: PreparedRequest | Exception


# An answer is sent as it is.
_Work = Generate | Abort | Ask | ReadAdapter | DropAdapter | HandOver | _Prepared | Answer
_Command = _Work | None  # None: the server has gone


def main() -> int:
    """Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the server too, which decides what they end
        signal.signal(number, signal.SIG_IGN)
    with redirect_stderr(UnwaitingStream(sys.stderr)):
        return run(own_channel(), CompiledEngine.from_config)


def run(channel: Channel, make_engine: Callable[[EngineConfig], AbstractContextManager[CompiledEngine]]) -> int:
    """Make the engine that the first message asks for, and serve until the server goes. Returns the exit status."""
    start = decode_for_engine(channel.receive())
    assert isinstance(start, Start)
    commands: SimpleQueue[_Command] = SimpleQueue()
    reader = _Reader(channel, commands)
    with ExitStack() as stack:
        try:
            check_version(start.version)
            config = EngineConfig(**start.config)
            if start.num_engines > 1 and (config.device == "cpu" or not torch.cuda.is_available()):
                share = config.gpu_memory_utilization / start.num_engines
                config = dataclasses.replace(config, gpu_memory_utilization=share)
            engine = stack.enter_context(make_engine(config))
        except Exception as error:
            channel.send(encode(Failed(type(error).__name__, str(error))))
            return 1
        reader.serves = True
        channel.send(encode(_started(engine, config)))
        EngineServer(engine, channel, commands).serve()
    return 0


class _Reader(threading.Thread):
    """Reads messages into ``commands``.

    Attributes:
        serves: whether somebody takes the commands; before that, the end of the server ends the process at once.
    """

    def __init__(self, channel: Channel, commands: "SimpleQueue[_Command]") -> None:
        super().__init__(name="compiled_llm messages", daemon=True)
        self._channel, self._commands = channel, commands
        self.serves = False
        self.start()

    def run(self) -> None:
        try:
            while True:
                message = decode_for_engine(self._channel.receive())
                assert not isinstance(message, Start)
                self._commands.put(message)
        except (EOFError, OSError):
            pass  # the server has gone
        finally:  # also when it sends what is no message: an engine that hears nothing more must not go on
            if not self.serves:
                os._exit(1)
            self._commands.put(None)


class EngineServer:
    """Steps an engine while it has requests, takes commands between steps, and sends what came of them.

    Args:
        channel: whatever has ``send``.
    """

    def __init__(self, engine: CompiledEngine, channel: Channel, commands: "SimpleQueue[_Command]") -> None:
        self._engine, self._channel, self._commands = engine, channel, commands
        self._pool = ThreadPoolExecutor(_PREPARING_THREADS, "compiled_llm prepare")
        self._preparing: set[str] = set()  # requests that the engine does not have yet
        self._ended: dict[str, set[int]] = {}  # of requests: continuations whose end was sent
        self._sent_at = 0.0
        if engine.runner.device.type == "cpu" and engine.runner.num_threads >= granted_cores():
            engine.join_deltas(*_DELTA_SECONDS)

    def serve(self) -> None:
        """Until the server goes."""
        try:
            while True:
                for command in commands_of_turn(self._engine, self._commands):
                    if command is None:
                        return
                    self._take(command)
                if self._engine.has_unfinished_requests():
                    self._step()
        except BrokenPipeError:  # the server went while something was sent
            return
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, command: _Work) -> None:
        if isinstance(command, Generate):
            self._prepare(command)
        elif isinstance(command, _Prepared):
            self._add(command)
        elif isinstance(command, Abort):
            self._preparing.difference_update(command.request_ids)
            self._engine.abort(command.request_ids)
            for request_id in command.request_ids:
                self._ended.pop(request_id, None)
        elif isinstance(command, ReadAdapter):
            number = command.number
            self._reading(command.adapter).add_done_callback(lambda read: self._commands.put(_answer(number, read)))
        elif isinstance(command, DropAdapter):
            self._engine.drop_adapter(_lora_request(command.adapter))
        elif isinstance(command, HandOver):
            self._hand_over(command)
        elif isinstance(command, Answer):
            self._send(command)
        else:
            self._reply(command)

    def _reply(self, question: Ask) -> None:
        error = None
        if question.resets_prefix_cache:
            try:
                self._engine.reset_prefix_cache()
            except RuntimeError as unfinished:
                error = str(unfinished)
        self._send(Answer(question.number, _numbers(self._engine), error))

    def _hand_over(self, asked: HandOver) -> None:
        """Requests that are being prepared have no tokens and no blocks yet."""
        found: dict[str, tuple[list[int], dict[str, Any] | None]] = dict.fromkeys(self._preparing, ([], None))
        self._preparing.clear()
        found |= self._engine.hand_over(asked.seconds)
        for request_id in found:
            self._ended.pop(request_id, None)
        self._send_outputs([])  # no step follows that would say that it has none any more
        self._send(HandedOver(asked.number, found))

    def _prepare(self, asked: Generate) -> None:
        """What may take long is done in another thread."""
        self._preparing.add(asked.request_id)
        reading = self._reading(asked.adapter)

        def prepare() -> None:
            self._commands.put(self._prepared(asked, reading))

        takes = asked.kv_transfer_params is not None
        if takes or asked.sampling.get("structured_outputs") or asked.sampling.get("bad_words"):
            reading.add_done_callback(lambda read: self._pool.submit(prepare))
        elif not reading.done():
            reading.add_done_callback(lambda read: prepare())
        else:
            self._add(self._prepared(asked, reading))

    def _reading(self, adapter: AdapterRef | None) -> "Future[LoRARequest | None]":
        return self._engine.begin_reading(None if adapter is None else _lora_request(adapter))

    def _prepared(self, asked: Generate, reading: "Future[LoRARequest | None]") -> _Prepared:
        token_ids, start = asked.prompt_token_ids, asked.scored_from
        prompt: Prompt = EncodedPrompt(None, token_ids[:start], asked.cache_salt)
        if start is not None:
            prompt = ScoredPrompt(prompt, token_ids[start:])
        try:
            self._engine.check_transfer(asked.kv_transfer_params)
            read = reading.result()
            return _Prepared(asked, self._engine.prepare(prompt, SamplingParams(**asked.sampling), lora_request=read))
        except Exception as error:
            return _Prepared(asked, error)

    def _add(self, prepared: _Prepared) -> None:
        asked, request = prepared
        if asked.request_id not in self._preparing:
            return  # it was aborted meanwhile
        self._preparing.remove(asked.request_id)
        try:
            if isinstance(request, Exception):
                raise request
            self._engine.add_request(
                asked.request_id,
                request,
                priority=asked.priority,
                kv_transfer_params=asked.kv_transfer_params,
                output_token_ids=asked.output_token_ids,
            )
            self._ended[asked.request_id] = set()
        except Exception as error:
            is_fault = not isinstance(error, ValueError | ImportError)
            text = f"{type(error).__name__}: {error}" if is_fault else str(error)
            self._send_outputs([Output(asked.request_id, [], error=text, is_fault=is_fault)])

    def _step(self) -> None:
        failure = None
        try:
            outputs = self._engine.step()
        except Exception as error:
            # The requests of that step have ended, and this gives their outputs. If it fails too, the engine is broken.
            outputs = self._engine.step()
            failure = error if isinstance(error, WorkerFailedError) else None
        found = [self._output(output) for output in outputs if output.request_id in self._ended]
        if found or time.monotonic() - self._sent_at >= _HEARTBEAT_SECONDS:
            self._send_outputs(found)
        if failure is not None:  # no step will run any more: the process ends, and may be started again
            raise failure

    def _output(self, output: RequestOutput) -> Output:
        ended = self._ended[output.request_id]
        pieces = [
            _piece(one)
            for one in output.outputs
            if (one.token_ids or one.text or one.finish_reason) and one.index not in ended
        ]
        ended.update(piece.index for piece in pieces if piece.finish_reason is not None)
        prompt_logprobs = output.prompt_logprobs
        if output.finished:
            del self._ended[output.request_id]
        return Output(
            output.request_id,
            pieces,
            output.num_cached_tokens,
            None if prompt_logprobs is None else [None if row is None else _row(row) for row in prompt_logprobs],
            _times(output.metrics) if output.finished else None,
            kv_transfer_params=output.kv_transfer_params,
        )

    def _send_outputs(self, outputs: list[Output]) -> None:
        scheduler = self._engine.scheduler
        self._sent_at = time.monotonic()
        self._send(Outputs(outputs, len(scheduler.running), scheduler.num_waiting))

    def _send(self, message: ToServer) -> None:
        self._channel.send(encode(message))


def _started(engine: CompiledEngine, config: EngineConfig) -> Started:
    directory = checkpoint_directory(config)
    limits, capacity = engine.runner.limits, engine.scheduler.request_capacity
    parts = None if engine.tokenizer is None else engine.tokenizer.parts
    tokenizer = b"" if parts is None else parts.backend
    return Started(
        version=VERSION,
        tokenizer=parts,
        capacity=capacity,
        limit="max_model_len" if capacity == limits.max_model_len else "size of the KV pool",
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=engine.model_config.vocab_size,
        block_size=limits.block_size,
        num_kv_blocks=engine.stats().num_kv_blocks,
        max_loras=limits.max_loras,
        device=engine.runner.device.type,
        sampling=suggested_sampling(directory),
        token_key=token_key(
            config,
            engine.model_config,
            engine.runner.device,
            engine.runner.num_threads,
            tokenizer,
            limits.steps_at_once,
        )
        if os.environ.get(KV_KEY_VARIABLE)
        else "",
    )


def _lora_request(adapter: AdapterRef) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.path)


def _answer(number: int, read: "Future[LoRARequest | None]") -> Answer:
    error = read.exception()
    if error is None:
        return Answer(number, {})
    return Answer(number, {}, str(error), is_missing=isinstance(error.__cause__, FileNotFoundError))


def _numbers(engine: CompiledEngine) -> dict[str, Any]:
    """What ``Answer`` says."""
    compiled = [report.cache for report in engine.compile_report().reports if report.cache != "eager"]
    numbers = dataclasses.asdict(engine.stats())
    numbers["external_hit_tokens"] = found = sum(numbers[f"{kind}_hit_tokens"] for kind in ("host", "disk", "peer"))
    numbers["external_queried_tokens"] = numbers["prefix_queried_tokens"] - numbers["prefix_hit_tokens"] + found
    numbers |= {"num_graphs": len(compiled), "num_pending_graphs": compiled.count("pending")}
    if (seconds := engine.limit_seconds()) is not None:
        numbers["limit_seconds"], numbers["device_seconds"] = seconds
    numbers["running_adapters"], numbers["waiting_adapters"] = engine.adapters_in_use()
    return numbers


def _piece(completion: CompletionOutput) -> Piece:
    logprobs = completion.logprobs
    return Piece(
        completion.index,
        completion.text,
        completion.token_ids,
        None if logprobs is None else [_row(row) for row in logprobs],
        completion.finish_reason,
        completion.stop_reason,
    )


def _row(row: Mapping[int, Logprob]) -> LogprobRow:
    return [(token_id, found.logprob, found.rank, found.decoded_token) for token_id, found in row.items()]


def _times(metrics: RequestMetrics) -> Times:
    moments = metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
    queue, prefill, decode = _differences(moments)
    return Times(queue, prefill, decode, metrics.num_preemptions)


def _differences(moments: Sequence[float | None]) -> list[float | None]:
    return [None if start is None or end is None else end - start for start, end in itertools.pairwise(moments)]


if __name__ == "__main__":
    sys.exit(main())
