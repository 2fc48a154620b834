"""A worker of an offline run: an engine in a process of its own, which gets rows through a socket and sends results.

Messages to it are JSON: ``{"rows": [...]}`` (row_to_json), ``{"stop": true}``, ``{"end": true}``. Each of its own is a
line of JSON and, after it, the lines of the results that it names. The first message to it are its settings.
"""

import argparse
import contextlib
import os
import platform
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.command_line import engine_config
from compiled_llm.api.lora_request import read_lora_modules
from compiled_llm.offline.flags import parse_arguments
from compiled_llm.offline.rows import Row, RowResult, RunProgress
from compiled_llm.system.child_process import Channel, decoded, encoded

FLUSH_RESULTS = 64  # results that are sent together at most


class SocketRows:
    """The rows that the driver sends, as a ``RowSource``. A driver that has gone ends the process.

    A thread takes each message as it comes, also while a step runs or results are being sent: the driver may be sending
    rows at that moment, and each would wait for the other.
    """

    def __init__(self, channel: Channel) -> None:
        self._messages = queue.SimpleQueue[dict[str, Any]]()
        self._rows: deque[Row] = deque()
        self._is_last = self.stopped = False
        threading.Thread(target=self._take_messages, args=(channel,), daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._is_last and not self._rows

    def take(self, wait: bool) -> Row | None:
        while not self._is_last:
            try:
                message = self._messages.get(block=wait and not self._rows)
            except queue.Empty:
                break
            self._rows.extend(Row(**values) for values in message.get("rows", ()))
            self.stopped |= "stop" in message
            self._is_last |= is_last(message)
            if self.stopped:
                self._rows.clear()
        return self._rows.popleft() if self._rows else None

    def _take_messages(self, channel: Channel) -> None:
        message: dict[str, Any] = {}
        while not is_last(message):
            try:
                message = decoded(channel.receive())
            except (EOFError, OSError):
                self._lose_driver()
                return
            self._messages.put(message)

    def _lose_driver(self) -> None:
        os._exit(1)  # nobody takes the results of what runs


def is_last(message: Mapping[str, Any]) -> bool:
    """Whether no row follows a message of the driver."""
    return "stop" in message or "end" in message


def send_results(channel: Channel, results: list[RowResult], state: Mapping[str, Any]) -> None:
    """One message with ``results`` and what else the driver is to know."""
    heads = [
        (r.index, r.name, len(r.line), r.error, r.num_prompt_tokens, r.num_cached_tokens, r.num_output_tokens)
        for r in results
    ]
    channel.send(encoded({**state, "results": heads}) + b"\n" + b"".join(result.line for result in results))


def read_results(message: bytes) -> tuple[list[RowResult], dict[str, Any]]:
    """What ``send_results`` sent."""
    head, _, content = message.partition(b"\n")
    state = decoded(head)
    results, start = [], 0
    for index, name, length, error, *counts in state.pop("results"):
        results.append(RowResult(index, name, content[start : start + length], error, *counts))
        start += length
    return results, state


def run_worker(connection: socket.socket) -> None:
    """Serve what comes through ``connection`` until it ends."""
    channel = Channel(connection)
    settings = decoded(channel.receive())
    source, results = SocketRows(channel), list[RowResult]()
    if settings["cpus"] is not None:
        os.sched_setaffinity(0, settings["cpus"])
    if os.path.isdir(settings["directory"]):
        os.chdir(settings["directory"])  # names of files in the arguments are relative to it
    args = parse_arguments(settings["program"], settings["arguments"])
    for name, value in settings["overrides"].items():
        setattr(args, name, value)
    if args.report is not None:
        args.report /= f"worker-{settings['number']}"
    try:
        from compiled_llm.offline.serving import LocalEngine  # it loads torch, after the affinity is set

        check_digests(args, settings["digests"])
        engine = LocalEngine(args, settings["sampling"])
        engine.prepare_report()
    except (ValueError, OSError, RuntimeError) as error:
        send_results(channel, [], {"failure": f"{error}"})
        return
    with contextlib.closing(engine):
        ready = {"max_num_seqs": engine.max_num_seqs, "description": engine.describe_start()}
        send_results(channel, [], {"ready": ready})
        for result in engine.serve(source):
            if result is not None:
                results.append(result)
            if results and (result is None or len(results) >= FLUSH_RESULTS):
                send_results(channel, results, _state(engine))
                results = []
        if results:
            send_results(channel, results, _state(engine))
        rows, is_written = engine.finish()
        send_results(channel, [], {**_state(engine), "finished": {"summary": rows, "is_written": is_written}})


def check_digests(args: argparse.Namespace, digests: Mapping[str, str]) -> None:
    """``ValueError`` unless the model and the tokenizer on this machine have ``digests``, if any are given."""
    from compiled_llm.offline.manifest import digests_of  # it loads torch

    if digests:
        found = digests_of(engine_config(args), read_lora_modules(args.lora_modules))
        others = [f"the {kind} on {platform.node()}" for kind in digests if found[kind] != digests[kind]]
        if others:
            raise ValueError(f"{' and '.join(others)} must be the same as where the run was started: copy it there")


def _state(engine: Any) -> dict[str, Any]:
    progress = RunProgress()
    engine.observe(progress)
    return {
        "running": progress.running,
        "waiting": progress.waiting,
        "kv_share": progress.kv_share,
        "faults": engine.faults(),
    }


def main() -> None:
    """The process: its standard input is the socket. An interrupt from a terminal is the driver's to deal with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    with connection, contextlib.redirect_stdout(sys.stderr):
        try:
            run_worker(connection)
        except (EOFError, ConnectionError):
            sys.exit(1)  # the driver has gone


if __name__ == "__main__":
    main()
