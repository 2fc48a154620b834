"""A process that compiles what another one sends (ahead.py): ``python -m compiled_llm.compiling.build_worker``."""

import os
import sys
from typing import Any

import torch

from compiled_llm.compiling.ahead import Built, Job, receive, send, to_bytes
from compiled_llm.compiling.cache import code_settings, differences
from compiled_llm.compiling.function import build


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no reply
    while True:
        try:
            job, settings = receive(sys.stdin.buffer)
        except EOFError:
            return
        send(replies, _run(job, settings))


def _run(job: Job, settings: dict[str, Any]) -> Built:
    """``settings``: those of the process that asks. Code of other ones would stand under the wrong key."""
    torch.set_num_threads(job.threads)
    other = differences(settings, code_settings())
    if other:
        return Built(b"", {}, f"torch is set up otherwise here: {'; '.join(other)}")
    try:
        ahead, facts = build(job.recipe(), job.name, job.args)
        payload = to_bytes(ahead)
    except Exception as error:  # whatever it is, the other process compiles for itself then, and raises it
        return Built(b"", {}, f"{type(error).__name__}: {error}")
    return Built(payload, facts, "")


if __name__ == "__main__":
    main()
