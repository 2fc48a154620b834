"""Chat templates of checkpoints and requests, which run in a process of their own (template_worker.py).

The process is kept, so a rendering costs a fraction of a millisecond more than it would here. A process that reaches a
limit is ended. One that ends without having reached any may have been killed: then the template is rendered once more,
in a new one.
"""

import signal
import time
from collections.abc import Mapping
from threading import Lock
from typing import Any

from compiled_llm.system.child_process import OUT_OF_MEMORY, ChildProcess, decoded, encoded

# Three times what the longest templates in use have.
MAX_TEMPLATE_CHARACTERS = 2**16
_BYTES_PER_CHARACTER = 6  # at most, in JSON
_BYTES = 2**16  # of an answer beside its text
# Of processor time for a request; a long chat takes some tens of milliseconds. And of the worker's address space.
SECONDS, MEMORY_BYTES = 2.0, 2**29
_WAITS = 15  # the processor may be busy with other things: so much longer an answer is waited for
_PACKAGES = ("jinja2", "markupsafe")


class TemplateProcess:
    """Sends requests to the process, one at a time. Threads may share it.

    Args:
        seconds: of processor time for each request.
        memory_bytes: of address space, the interpreter's own 30 MiB or so among them.
    """

    def __init__(self, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._lock = Lock()
        module = "compiled_llm.text.template_worker"
        self._child = ChildProcess("the process for chat templates", module, _PACKAGES, (seconds, memory_bytes))
        self._owes_answer = False

    def ask(self, request: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
        """The worker's answer. ``request``: values of JSON, see template_worker.py.

        Raises:
            ValueError: the template reached a limit, ended the process, or the answer has more than ``most_bytes``.
            RuntimeError: the process could not be started.
        """
        content = encoded(request)
        with self._lock:
            try:
                if self._owes_answer:  # which must not be taken for that to this request
                    self._child.end()
                answer = self._answer(content, most_bytes)
                if answer is None:
                    answer = self._answer(content, most_bytes)
                if answer is None:
                    raise ValueError(
                        f"the chat template ended the process in which it ran, and a new one too: "
                        f"{self._child.how_it_ended()}"
                    )
            except BaseException:  # an interrupt too
                self._child.end()
                raise
        return decoded(answer)

    def _answer(self, content: bytes, most_bytes: int) -> bytes | None:
        """None: the process has ended, and no limit is the reason."""
        channel = self._child.channel()
        self._owes_answer = True
        deadline = time.monotonic() + _WAITS * self._seconds
        try:
            channel.send(content, deadline)
            answer = channel.receive(deadline, most_bytes)
        except TimeoutError as error:
            waited = f"{_WAITS * self._seconds:g} s"
            raise ValueError(f"the chat template gave no answer within {waited}") from error
        except (EOFError, ConnectionError) as error:
            if limit := self._limit():
                raise ValueError(f"the chat template {limit}") from error
            return None
        except ValueError as error:
            raise ValueError(f"the chat template makes {error}") from error
        self._owes_answer = False
        return answer

    def close(self) -> None:
        """End the process, after the request under way. A later request would start another."""
        with self._lock:
            self._child.end()

    def _limit(self) -> str | None:
        """Which limit the process that has ended had reached."""
        status = self._child.status()
        if status == -signal.SIGPROF:
            return f"took longer than {self._seconds:g} s of processor time"
        if status == OUT_OF_MEMORY:
            return f"needed more than {self._memory_bytes >> 20} MiB of memory"
        return None


class ChatTemplate:
    """A Jinja template as ``transformers`` defines them for chat; it sees plain values only and cannot call Python.

    Attributes:
        names: of the variables that it reads, such as ``messages`` or ``enable_thinking``.
        literals: the strings that are written in it, and the names of the attributes that it reads.

    Args:
        process: in which it runs. Templates may share it.

    Raises:
        ValueError: it is too long, or no template.
    """

    def __init__(self, source: str, process: TemplateProcess) -> None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARACTERS:
            given = f"{len(source)} characters" if isinstance(source, str) else type(source).__name__
            most = MAX_TEMPLATE_CHARACTERS
            raise ValueError(f"the chat template must be a str of at most {most} characters, given {given}")
        self._source = source
        self._process = process
        facts = self._ask({}, 2 * len(source))  # one character may be in names and literals
        self.names = frozenset(facts["names"])
        self.literals = frozenset(facts["literals"])

    def render(self, variables: Mapping[str, Any], max_characters: int, unescaped: str = "") -> str:
        """The text that it makes of ``variables``, which are values of JSON.

        Args:
            variables: by name: ``messages``, ``add_generation_prompt``, ``bos_token`` and so on.
            max_characters: of the text.
            unescaped: characters that ``tojson`` leaves as they are even where the template asks it for ASCII.

        Raises:
            ValueError: the template refuses the variables, fails with them, makes a longer text, or
                takes more time or memory than templates may. The message says which.
        """
        request = {"variables": variables, "max_characters": max_characters, "unescaped": unescaped}
        return self._ask(request, max_characters)["text"]

    def _ask(self, request: Mapping[str, Any], characters: int) -> dict[str, Any]:
        answer = self._process.ask({"source": self._source, **request}, _BYTES_PER_CHARACTER * characters + _BYTES)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer
