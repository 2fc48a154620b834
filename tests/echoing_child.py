"""What the child of test_child_process.py runs: it answers each message as its first word asks."""

import os
import time

from compiled_llm.system.child_process import ProcessorTime, decoded, encoded, own_channel


def main() -> None:
    channel = own_channel()
    settings = decoded(channel.receive())
    channel.send(b"refused" if settings == "bad" else b"")
    while True:
        word, value = decoded(channel.receive())
        if word == "exit":
            os._exit(value)
        if word == "sleep":
            time.sleep(value)
        if word == "compute":
            with ProcessorTime(value):
                while True:
                    pass
        channel.send(encoded([settings, word, value]))
