"""ChatTemplate: a chat template of a checkpoint or a request, which runs in another process."""

from collections.abc import Mapping
from typing import Any

from compiled_llm.text.template_process import TemplateProcess

# Three times what the longest templates in use have.
MAX_TEMPLATE_CHARACTERS = 2**16
_BYTES_PER_CHARACTER = 6  # at most, in JSON
_BYTES = 2**16  # of an answer beside its text


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
        """The text that it makes of ``variables``, whose values are those of JSON.

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
