"""Chat templates in the manner of those in use, and conversations for them."""

from pathlib import Path
from typing import Any

# chatml-tools has tools as JSON, tool responses gathered into one turn, reasoning kept for the last turn alone;
# miscellany documents, and a good part of what else templates use.
_NAMES = ("chatml", "chatml-tools", "headers", "inst", "generation", "parts", "miscellany")
TEMPLATES = {
    name: (Path(__file__).parent / "templates" / f"{name}.jinja").read_text().removesuffix("\n") for name in _NAMES
}
CHATML, CHATML_TOOLS = TEMPLATES["chatml"], TEMPLATES["chatml-tools"]
INST, GENERATION = TEMPLATES["inst"], TEMPLATES["generation"]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The "weather" of a <city> & é 🚀',
            "parameters": {"type": "object", "properties": {"n": {"type": "string", "enum": ["c", "f"]}}},
        },
    }
]
DOCUMENTS = [{"title": "é <b>", "text": "some text"}, {"title": "🚀", "text": ""}]
QUESTION = {"role": "user", "content": " Is 1 <b> 2 & café 🚀?\n"}
TURNS = [
    QUESTION,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.  "},
    {"role": "user", "content": "So?"},
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "get_weather", "arguments": {"n": "c", "d": [1]}}}
    ],
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "turns": TURNS,
    "system": [{"role": "system", "content": "Be <good>. "}, *TURNS],
    "tool": [QUESTION, CALL, {"role": "tool", "tool_call_id": "a1", "content": '{"t": "<3"}'}],
    "reasoning": [QUESTION, {"role": "assistant", "content": "Yes", "reasoning": "one < two", "name": None}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a <"}, {"type": "text", "text": "b> "}]}],
}
