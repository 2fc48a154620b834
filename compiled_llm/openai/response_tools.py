"""Tools of a request for a response -> functions, which are all that a model is told of."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.api.readable import shown

# Tools that OpenAI runs itself, by how their types begin: a model is not told of them.
PROVIDER_TOOLS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    "programmatic_tool_calling",
)
_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
                      "additionalProperties": False}  # fmt: skip


class ToolName(NamedTuple):
    """What a client calls a tool.

    Attributes:
        is_custom: its input is any text; the model gives that as the argument "input" of a function.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function(self) -> str:
        """The model's name of it."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class Tools(NamedTuple):
    """What a request says of tools.

    Attributes:
        functions, choice: as a chat has them.
        names: of the functions.
        ignored: types of tools that are left out.
    """

    functions: list[dict[str, Any]]
    choice: Any
    names: dict[str, ToolName]
    ignored: tuple[str, ...]


def read_tools(tools: Any, choice: Any) -> Tools:
    """``ValueError``: a tool or the choice of one is not as it must be."""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of objects with type, given {shown(tools)}")
    ignored = {kind for tool in tools for kind in PROVIDER_TOOLS if str(tool.get("type")).startswith(kind)}
    found = list(_functions(tools))
    names = {name.function: name for name, _ in found}
    functions = [function for _, function in found]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list):
            raise ValueError(f"tool_choice: tools must be a list of allowed ones, given {shown(allowed)}")
        kept = {_chosen(one, names) for one in allowed if not _is_provided(one)}
        functions = [function for function in functions if function["function"]["name"] in kept]
        choice = choice.get("mode", "auto")
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": {"name": _chosen(choice, names)}}
    if choice not in ("auto", "none", "required") and not isinstance(choice, Mapping):
        raise ValueError(
            "tool_choice must be 'auto', 'none', 'required' or an object of type 'function', 'custom' or "
            f"'allowed_tools', given {shown(choice)}"
        )
    if choice == "required" and not functions:
        raise ValueError("tool_choice must be 'auto' or 'none' where no tools are served, given 'required'")
    return Tools(functions, choice, names, tuple(sorted(ignored)))


def _is_provided(tool: Any) -> bool:
    return isinstance(tool, Mapping) and str(tool.get("type")).startswith(PROVIDER_TOOLS)


def _functions(
    tools: Sequence[Mapping[str, Any]], namespace: str | None = None
) -> Iterator[tuple[ToolName, dict[str, Any]]]:
    """Each tool's name, and the tool as a chat has functions."""
    for tool in tools:
        kind, name = tool.get("type"), tool.get("name")
        if _is_provided(tool):
            continue
        if kind not in ("function", "custom", "namespace"):
            allowed = f"function, custom, namespace, or {', '.join(PROVIDER_TOOLS)}, which are left out"
            raise ValueError(f"tools must be of type {allowed}, given {shown(tool)}")
        if not isinstance(name, str) or not name:
            raise ValueError(f"tools must have a name each, given {shown(tool)}")
        if kind == "namespace":
            inner = tool.get("tools")
            if (
                namespace is not None
                or not isinstance(inner, list)
                or not all(isinstance(one, Mapping) for one in inner)
            ):
                raise ValueError(f"tools of type 'namespace' must have a list of other tools, given {shown(tool)}")
            yield from _functions(inner, name)
            continue
        found = ToolName(name, namespace, kind == "custom")
        function = {"name": found.function, "description": tool.get("description")}
        if kind == "custom":
            function |= {"description": _described(tool), "parameters": _CUSTOM_PARAMETERS}
        else:
            function |= {"parameters": tool.get("parameters"), "strict": tool.get("strict")}
        given = {key: value for key, value in function.items() if value is not None}
        yield found, {"type": "function", "function": given}


def _described(tool: Mapping[str, Any]) -> str | None:
    """A custom tool's description, with the grammar of its input if it has one."""
    form, description = tool.get("format"), tool.get("description")
    if not isinstance(description, str | None):
        raise ValueError(f"tools: description must be a str, given {shown(description)}")
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        return description
    grammar = f"The input must be of this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    return "\n\n".join(filter(None, (description, grammar)))


def _chosen(choice: Any, names: Mapping[str, ToolName]) -> str:
    """The function that an object names."""
    name = choice.get("name") if isinstance(choice, Mapping) else None
    found = [function for function, tool in names.items() if name == tool.name or name == function]
    if not found:
        raise ValueError(f"tool_choice must name one of the tools, {', '.join(names) or 'of which there are none'}, "
                         f"given {shown(choice)}")  # fmt: skip
    return found[0]
