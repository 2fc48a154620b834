"""Conversations -> token ids, through the chat template of the model.

The template's special tokens become special tokens. What a message spells of a special token stays text, whatever the
template does with it: before it gets a text, a mark is put after each character that a special token starts with, and
what has a mark in it is no special token. The mark is a character that is found nowhere else in the chat.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compiled_llm.api.argument_checks import UnservableError
from compiled_llm.api.readable import shown
from compiled_llm.text.chat_template import ChatTemplate, TemplateProcess
from compiled_llm.text.prompts import MAX_CHARACTERS_PER_TOKEN, check_unicode
from compiled_llm.text.tokenizer import Tokenizer

_MAX_DEPTH = 32  # of lists and dicts in a message or a tool
_MAX_TEMPLATES = 8  # that are kept compiled
_MAX_WHOLE, _MAX_WHOLES = 64, 256  # characters of a template's string that messages are searched for, and such strings
# A template may write a role between two halves of a special token, such as <|user|>: it must not hold such itself.
_ROLE = re.compile(r"[\w .:/-]{1,64}")
# What a message's reasoning may be called. As in transformers, templates find it under the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def messages_list(messages: Any) -> list[Any]:
    """One conversation or a list of them -> a list. An empty list is one conversation, without messages.

    Raises:
        ValueError: it is no list.
    """
    if not isinstance(messages, list | tuple):
        given = type(messages).__name__
        raise ValueError(f"messages must be a list of dicts with 'role' and 'content', or of such lists, given {given}")
    if any(isinstance(item, list | tuple) for item in messages):
        return list(messages)
    return [messages]


class ChatEncoder:
    """Encodes conversations for one tokenizer. Reads each template once. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._process = TemplateProcess()
        self._compiled: dict[str, tuple[ChatTemplate, _Marker]] = {}

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """(text, token ids) of one conversation.

        Args:
            messages: dicts with ``role``, a str, and ``content``: a str or a list of ``{"type": "text", "text": str}``,
                whose texts are joined for a template without such lists. It may be None together with ``tool_calls``,
                whose ``arguments`` may be JSON in a str: templates get what it spells. What else a message has is
                passed to the template.
            max_tokens: a chat of more text than these could hold is refused. How many tokens come out is for the caller
                to check.
            hints: variables like ``chat_template_kwargs``, for a template that has a use for them.
            others: as in ``CompiledEngine.chat``.

        Raises:
            UnservableError: the model has no tokenizer or no template, the template does not compile, or another
                argument than ``messages`` has another form or means nothing to the template.
            ValueError: the messages have another form, or the template fails or refuses them. Also if the text spells a
                special token and the tokenizer cannot read it as text.
        """
        if self._tokenizer is None:
            raise UnservableError("the model has no tokenizer, and chat needs one: give the tokenizer argument")
        try:
            _check_flags(add_generation_prompt, continue_final_message)
            variables = {
                **_check_kwargs(chat_template_kwargs),
                "tools": _check_dicts("tools", tools),
                "documents": _check_dicts("documents", documents),
            }
            template, marker = self._compile(chat_template, bool(tools))
            variables = {**{name: hint for name, hint in (hints or {}).items() if name in template.names}, **variables}
            _check_use(template, variables)
        except ValueError as error:  # it would be raised for any messages
            raise UnservableError(str(error)) from error
        chat = _check_messages(messages)
        if not self._takes_lists(template, chat):
            chat = [_with_joined_text(message) for message in chat]

        text, mark = self._render(
            template, marker, chat, variables, max_tokens, add_generation_prompt, continue_final_message
        )
        check_unicode("messages", text)
        plain = text.replace(mark, "")
        if excess := self._tokenizer.excess(plain, max_tokens):
            raise ValueError(
                f"messages are too long: the chat must be shorter than {max_tokens} tokens, given {excess[0]} in the "
                f"first {excess[1]} characters alone"
            )
        return plain, self._tokenizer.encode_chat(text, mark)

    def _render(
        self,
        template: ChatTemplate,
        marker: "_Marker",
        chat: list[dict[str, Any]],
        variables: dict[str, Any],
        max_tokens: int,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> tuple[str, str]:
        """The text with its marks, and the character that is the mark."""
        assert self._tokenizer is not None
        named, most = self._tokenizer.named_tokens, MAX_CHARACTERS_PER_TOKEN * max_tokens
        length = sum(len(text) for text in _texts([chat, variables]))
        if length > most:
            raise ValueError(f"messages are too long: {length} characters cannot be less than {max_tokens} tokens")
        mark, end = _unused_characters(_texts([chat, variables, named, list(template.literals)]))
        chat = [{**marker.mark(message, mark), "role": message["role"]} for message in chat]
        # Given under the name of a special token, a text is meant as that.
        variables = {name: value if name in named else marker.mark(value, mark) for name, value in variables.items()}
        variables = {**named, **variables, "messages": chat, "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            chat[-1], final = _with_end(chat[-1], end + " ")
        try:
            text = template.render(variables, most, unescaped=mark + end)
        except ValueError as error:  # its text may be from a message
            raise ValueError(str(error).replace(mark, "").replace(end, "")) from error
        return (_until(end, text, final) if continue_final_message else text), mark

    def close(self) -> None:
        """End the process in which templates run."""
        self._process.close()

    def _compile(self, source: str | None, has_tools: bool) -> tuple[ChatTemplate, "_Marker"]:
        assert self._tokenizer is not None
        if source is None:
            own = self._tokenizer.chat_templates
            source = own.get("tool_use" if has_tools else "default", own.get("default"))
            if source is None:
                raise ValueError("the model has no chat template: give one with the chat_template argument")
        if not isinstance(source, str):
            raise ValueError(f"chat_template must be a str, given {type(source).__name__}")
        compiled = self._compiled.get(source)
        if compiled is None:
            template = ChatTemplate(source, self._process)
            compiled = template, _Marker(list(self._tokenizer.special_tokens), template.literals)
            if len(self._compiled) >= _MAX_TEMPLATES:
                self._compiled.clear()
            self._compiled[source] = compiled
        return compiled

    def _takes_lists(self, template: ChatTemplate, chat: list[dict[str, Any]]) -> bool:
        """Whether the template, if ``chat`` has any, makes text of lists of parts; found by a trial."""
        assert self._tokenizer is not None
        if not any(isinstance(message.get("content"), list) for message in chat):
            return True
        probe = {"role": "user", "content": [{"type": "text", "text": "probe"}]}
        variables = {**self._tokenizer.named_tokens, "messages": [probe], "add_generation_prompt": True}
        try:
            text = template.render(variables, 2**20)
        except ValueError:
            return False
        return "probe" in text and not re.search(r"""\{\s*['"]type""", text)  # a list as text is not what was meant


class _Marker:
    """Puts a mark into texts wherever a special token could be made of them.

    That is after every character that a special token starts with, and before a text that could be the rest of one
    that the template starts, as in ``'<' + name``. Strings that are written in the template, such as ``</think>``, are
    left whole where no special token could start in them, so that the template still finds them in a message.
    """

    def __init__(self, special_tokens: Sequence[str], literals: frozenset[str]) -> None:
        firsts = {token[0] for token in special_tokens}
        begun = {token[:length] for token in special_tokens for length in range(1, len(token) + 1)}

        def is_whole(literal: str) -> bool:
            """Whether it has first characters, and no special token starts at any, also none that ends after it."""
            rests = [literal[at:] for at, character in enumerate(literal) if character in firsts]
            return bool(rests) and not any(rest in begun or rest.startswith(tuple(special_tokens)) for rest in rests)

        whole = sorted(filter(is_whole, (text for text in literals if len(text) <= _MAX_WHOLE)), key=len, reverse=True)
        alternatives = [re.escape(text) for text in (*whole[:_MAX_WHOLES], *sorted(firsts))]
        self._pattern = re.compile("|".join(alternatives) or "(?!)")
        self._literals = literals
        # The parts of special tokens that are missing after a literal which ends with the part before them.
        ends = {literal[-length:] for literal in literals for length in range(1, max(map(len, begun), default=0))}
        splits = ((token[:at], token[at:]) for token in special_tokens for at in range(1, len(token)))
        self._rests = tuple({rest for begin, rest in splits if begin in ends})
        self._parts = {rest[:length] for rest in self._rests for length in range(1, len(rest) + 1)}

    def mark(self, value: Any, mark: str) -> Any:
        """A copy of a plain value with marks in all its texts, keys among them."""
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if isinstance(value, dict):
            return {self._mark_text(key, mark): self.mark(item, mark) for key, item in value.items()}
        return [self.mark(item, mark) for item in value] if isinstance(value, list) else value

    def _mark_text(self, text: str, mark: str) -> str:
        marked = self._pattern.sub(lambda match: match[0] + mark if len(match[0]) == 1 else match[0], text)
        goes_on = text in self._parts or text.startswith(self._rests)
        return mark + marked if goes_on and text not in self._literals else marked


# -- What is given


def _check_flags(add_generation_prompt: Any, continue_final_message: Any) -> None:
    flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, given {shown(flag)}")
    if all(flags.values()):
        raise ValueError("continue_final_message=True needs add_generation_prompt=False: a chat has one end")


def _check_use(template: ChatTemplate, variables: Mapping[str, Any]) -> None:
    for name, value in variables.items():
        if name not in template.names and (value or name not in ("tools", "documents")):
            raise ValueError(f"the chat template has no use for {shown(name)}: leave it out, or give another template")


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies without keys whose value is None, as templates expect them."""
    if not isinstance(messages, list | tuple) or not messages:
        given = "an empty one" if isinstance(messages, list | tuple) else type(messages).__name__
        raise ValueError(f"messages must be a list of one or more dicts with 'role' and 'content', given {given}")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a dict with 'role' and 'content', given {type(message).__name__}")
    plain = {key: value for key, value in _plain(name, message).items() if value is not None}
    role, content, tool_calls = plain.get("role"), plain.get("content"), plain.get("tool_calls")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ValueError(
            f"{name}: role must be 1 to 64 letters, digits, spaces or any of _.:/-, such as 'user', given {shown(role)}"
        )
    if tool_calls is not None:
        calls = f"{name}: tool_calls"
        tool_calls = with_decoded_arguments(calls, _check_dicts(calls, tool_calls) or [])
        plain["tool_calls"] = _plain(calls, tool_calls)  # what was JSON in a text may be nested deep
    if not tool_calls:
        plain.pop("tool_calls", None)  # templates ask whether there is such a key
    if content is None and not tool_calls:
        raise ValueError(f"{name}: content must be a str or a list of text parts; None only beside tool_calls")
    if isinstance(content, list):
        for part in content:
            _check_part(f"{name}: content", part)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{name}: content must be a str or a list of text parts, given {type(content).__name__}")
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _check_part(name: str, part: Any) -> None:
    if not isinstance(part, dict):
        raise ValueError(
            f"{name}: a part must be a dict such as {{'type': 'text', 'text': '...'}}, given {shown(part)}"
        )
    if part.get("type") != "text":
        raise ValueError(f"{name}: a part must have the type 'text', all that this engine serves, given {shown(part)}")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{name}: a part of type 'text' must have a str as 'text', given {shown(part)}")


def _check_dicts(name: str, dicts: Any) -> list[dict[str, Any]] | None:
    if dicts is None:
        return None
    if not isinstance(dicts, list | tuple) or not all(isinstance(item, Mapping) for item in dicts):
        raise ValueError(f"{name} must be a list of dicts, given {shown(dicts)}")
    return _plain(name, dicts)


def _check_kwargs(kwargs: Any) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"chat_template_kwargs must be a dict, given {type(kwargs).__name__}")
    for name in _RESERVED:
        if name in kwargs:
            raise ValueError(f"chat_template_kwargs must not have {shown(name)}: it is an argument of its own")
    return _plain("chat_template_kwargs", kwargs)


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """A copy of the values of JSON alone, so that a template gets at no object's methods. ``ValueError`` for others."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{name} must not be more than {_MAX_DEPTH} lists and dicts deep")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{name} must be a str, a number, a bool, None, a list or a dict with keys of str, given {shown(value)}"
        )
    return {str.__str__(key): _plain(f"{name}[{key!r:.40}]", item, depth + 1) for key, item in value.items()}


def _texts(value: Any) -> Iterator[str]:
    """All strings in a plain value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value if isinstance(value, list) else (*value.keys(), *value.values()):
            yield from _texts(item)


def _unused_characters(texts: Iterator[str]) -> tuple[str, str]:
    """Two that are in none of them, which are no spaces, and which Python and JSON write without escapes."""
    used: set[str] = set().union(*texts)
    unused = (sign for sign in map(chr, range(0x2801, 0xD800)) if sign.isprintable() and sign not in used)
    found = tuple(itertools.islice(unused, 2))
    if len(found) < 2:
        raise ValueError("messages must leave two of the signs of Unicode unused, given all of them")
    return found[0], found[1]


# -- The content of a message


def _with_joined_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def _with_end(message: dict[str, Any], end: str) -> tuple[dict[str, Any], str]:
    """``message`` with ``end`` after the last text in its content, and that text."""
    content: Any = message.get("content")
    text = content[-1]["text"] if isinstance(content, list) and content else content
    if not isinstance(text, str):
        raise ValueError("continue_final_message needs a text as the last message's content, given none")
    ended = text + end if isinstance(content, str) else [*content[:-1], {**content[-1], "text": text + end}]
    return {**message, "content": ended}, text


def _until(end: str, text: str, final: str) -> str:
    """``text`` up to ``end``, which came after the last message's text ``final``, and a space after it."""
    position = text.rfind(end)
    if position < 0 or final.strip() not in text:
        raise ValueError("continue_final_message: the chat template does not write the last message as it is given")
    # Without the space, the template strips messages.
    kept = text[:position] if text[position : position + 2] == end + " " else text[:position].rstrip()
    return kept.replace(end, "")


# -- Tool calls


_ARGUMENTS = "arguments"


def with_decoded_arguments(name: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of tool calls whose ``arguments`` are values, not text: as vLLM has them, {} where there are none.

    Args:
        name: of the tool calls, for messages.
        calls: ``{"function": {"name": str, "arguments": ...}}``, or what is in "function" alone.

    Raises:
        ValueError: a text is not JSON.
    """
    return [_decoded_call(f"{name}[{number}]", call) for number, call in enumerate(calls)]


def _decoded_call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _decoded_call(f"{name}.function", dict(function))}
    # A call of another kind than a function has no arguments.
    return {**call, _ARGUMENTS: _decoded(name, call.get(_ARGUMENTS))} if "name" in call else call


def _decoded(name: str, arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name}.arguments must be a dict, or one as JSON in a str: {error}, given {shown(arguments)}"
        ) from error
    return {} if found is None else found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")
