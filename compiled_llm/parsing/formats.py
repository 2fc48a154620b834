"""The formats in which families of models write tool calls and reasoning: their marks, and how templates tell them.

A new format whose calls have one of these layouts is a row of the table.
"""

import dataclasses
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from typing import Literal

Layout = Literal["json", "named", "tagged", "python"]


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How tool calls are written.

    Attributes:
        layout: of a call, after its mark. "json": an object with name and arguments, or a list of such; "named": the
            name, ``after_name``, the arguments as JSON; "tagged": the name, then each argument between ``tags``;
            "python": calls with keyword arguments.
        begins: marks, any of which comes before a call or a list of calls.
        ends: marks that may follow it.
        around: marks that may stand around all calls, and say nothing else.
        bare: a text may begin with a call that has no mark before it. Then its name must be that of a tool.
        after_name: texts between name and arguments; "{" is a part of the arguments.
        before_name: a text before the name.
        written: a call as a model is to write it: before the name, between it and the arguments, after these.
        joined: around all calls and between two: their begin, what separates them, their end.
        tags: before and after an argument's name, and before and after its value.
        template: a chat template has all of one of these texts in it.
        make_id: a call's id.
    """

    layout: Layout
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    bare: bool = False
    after_name: tuple[str, ...] = ()
    before_name: str = ""
    written: tuple[str, str, str] = ("", "", "")
    joined: tuple[str, str, str] = ("", "\n", "")
    tags: tuple[str, str, str, str] = ("", "", "", "")
    template: tuple[tuple[str, ...], ...] = ()
    make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends, *self.around)


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """How reasoning is written: between the first of ``begins`` and the first of ``ends``; a model may use others."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    template: tuple[tuple[str, ...], ...]

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends)


AUTO, NONE = "auto", "none"  # instead of a format: the one that the chat template tells of; no one
HARMONY = "gpt_oss"  # of calls and of reasoning: both are messages of one format, see harmony_reader.py
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_HARMONY_TEMPLATE = (("<|channel|>", "<|message|>"),)


def _mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _json_written(name: str, arguments: str = "arguments", before: str = "", after: str = "") -> tuple[str, str, str]:
    return (f'{before}{{"{name}": "', f'", "{arguments}": ', f"}}{after}")


_DEEPSEEK = {
    "begins": ("<｜tool▁call▁begin｜>",),
    "ends": ("<｜tool▁call▁end｜>",),
    "around": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "joined": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
}
# In the order in which templates are searched: what tells a later one may be in the template of an earlier one too.
CALL_FORMATS: Mapping[str, CallFormat] = {
    HARMONY: CallFormat(
        "named",
        around=HARMONY_MARKS,
        written=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        template=_HARMONY_TEMPLATE,
    ),
    "deepseek_v3": CallFormat(
        "named",
        **_DEEPSEEK,  # type: ignore[arg-type]
        before_name="function<｜tool▁sep｜>",
        after_name=("\n```json\n",),
        written=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        template=(("<｜tool▁call▁begin｜>", "```json"),),
    ),
    "deepseek_v31": CallFormat(
        "named",
        **_DEEPSEEK,  # type: ignore[arg-type]
        after_name=("<｜tool▁sep｜>",),
        written=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        template=(("<｜tool▁call▁begin｜>",),),
    ),
    "kimi_k2": CallFormat(
        "named",
        begins=("<|tool_call_begin|>",),
        ends=("<|tool_call_end|>",),
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        after_name=("<|tool_call_argument_begin|>",),
        written=("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        joined=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        template=(("<|tool_call_begin|>",),),
    ),
    "mistral": CallFormat(
        "named",
        begins=("[TOOL_CALLS]",),
        after_name=("[ARGS]", "[CALL_ID]", "{"),
        written=("[TOOL_CALLS]", "[ARGS]", ""),
        joined=("", "", ""),
        template=(("[TOOL_CALLS]", "[ARGS]"),),
        make_id=_mistral_id,
    ),
    "mistral_list": CallFormat(
        "json",
        begins=("[TOOL_CALLS]",),
        written=_json_written("name"),
        joined=("[TOOL_CALLS][", ", ", "]"),
        template=(("[TOOL_CALLS]",),),
        make_id=_mistral_id,
    ),
    "qwen3_coder": CallFormat(
        "tagged",
        begins=("<tool_call>", "<function="),
        ends=("</function>", "</tool_call>"),
        before_name="<function=",
        after_name=(">",),
        tags=("<parameter=", ">", "\n", "</parameter>"),
        written=("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        template=(("<tool_call>", "<function=", "<parameter="),),
    ),
    "glm45": CallFormat(
        "tagged",
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        after_name=("\n", "<arg_key>", "</tool_call>"),
        tags=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        written=("<tool_call>", "\n", "</tool_call>"),
        template=(("<arg_key>",),),
    ),
    "phi4_mini": CallFormat(
        "json",
        begins=("functools",),
        written=_json_written("name"),
        joined=("functools[", ", ", "]"),
        template=(("functools[",),),
    ),
    "granite": CallFormat(
        "json",
        begins=("<|tool_call|>", "<tool_call>", "<function_call>"),
        ends=("</tool_call>",),
        written=_json_written("name"),
        joined=("<|tool_call|>[", ", ", "]"),
        template=(("<|tool_call|>",), ("<function_call>",)),
    ),
    "pythonic": CallFormat(
        "python",
        begins=("<|python_start|>", "<function_calls>"),
        ends=("<|python_end|>", "</function_calls>"),
        bare=True,
        written=("", "(", ")"),
        joined=("[", ", ", "]"),
        template=(("<|python_start|>",), ("<function_calls>",), ("[func_name1(",)),
    ),
    "hermes": CallFormat(
        "json",
        begins=("<tool_call>",),
        ends=("</tool_call>",),
        written=_json_written("name", before="<tool_call>\n", after="\n</tool_call>"),
        template=(("<tool_call>", '{"name": '), ("<tool_call>", '{\\"name\\": ')),
    ),
    "llama3_json": CallFormat(
        "json",
        begins=("<|python_tag|>",),
        ends=("<|eom_id|>",),
        bare=True,
        written=_json_written("name", "parameters"),
        joined=("", "; ", ""),
        template=(("<|python_tag|>", '"parameters"'), ('"parameters": dictionary of argument name',)),
    ),
}
_THINK = ReasoningFormat(("<think>",), ("</think>",), (("<think>",), ("</think>",)))
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    HARMONY: ReasoningFormat(HARMONY_MARKS, (), _HARMONY_TEMPLATE),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        (("Here is my thought process:",),),
    ),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), (("[THINK]",),)),
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
}
# What vLLM and SGLang call formats that are the same -> the name here.
CALL_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("openai", "gpt-oss"), HARMONY),
    **dict.fromkeys(("glm", "glm47"), "glm45"),
    **dict.fromkeys(("granite4", "qwen", "qwen25", "qwen3_json"), "hermes"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    **dict.fromkeys(("llama4_pythonic", "olmo3"), "pythonic"),
    **{"deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31"},
    **{"phi4_mini_json": "phi4_mini", "qwen3_xml": "qwen3_coder"},
}
REASONING_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("openai_gptoss", "gpt-oss"), HARMONY),
    **dict.fromkeys(("deepseek-r1", "deepseek-v3", "deepseek_v3"), "deepseek_r1"),
    **dict.fromkeys(("glm45", "glm47", "holo2", "olmo3", "qwen3-thinking"), "qwen3"),
}


def format_of(templates: Collection[str], formats: Mapping[str, CallFormat] | Mapping[str, ReasoningFormat]) -> str:
    """The name of the format that chat templates tell of; "none": of none that is known."""
    text = "\n".join(templates)
    for name, known in formats.items():
        if any(all(part in text for part in parts) for parts in known.template):
            return name
    return NONE
