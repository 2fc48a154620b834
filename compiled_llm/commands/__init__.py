"""The commands of ``compiled-llm``: a file each, which has

    parser(program) -> FlagParser               its flags, for the help and for completion in a shell
    main(program, arguments) -> exit status     what it does

``program`` is what the user typed before the flags, such as ``"compiled-llm batch"``. A file imports torch within
``main`` alone, so that help and completion come at once. Commands that belong together, such as benchmarks, are a
package of such files with a table ``COMMANDS`` of its own. What is more than flags and printing lies in another room.
"""

import importlib
from types import ModuleType

# Name -> what it does, in a line of ``compiled-llm --help``, the most used first.
COMMANDS = {
    "generate": "complete a text, and print the answer as it comes",
    "chat": "talk with a model in the terminal",
    "serve": "answer requests over HTTP, for clients of OpenAI's interface",
    "drain": "move the requests of an engine, or of a server, to others",
    "batch": "serve files of rows, and write a result for each",
    "check": "what there is to know of a model before it is served",
    "tokenize": "the token ids of a text, and what each token stands for",
    "exact": "prove that a request's bits do not depend on how it is served",
    "report": "what a run did, what quantisation costs, what a GPU would run",
    "quantize": "write a quantised checkpoint, calibrated on a text",
    "merge-lora": "write a checkpoint with a LoRA adapter merged into its weights",
    "tune": "find bucket sizes, drafts or kernels' tiles that suit this machine and work",
    "plan": "which models to serve on which devices, simulated",
    "bench": "measure the engine, its parts, and other engines beside it",
    "compile": "compile a model's graphs ahead of serving, or carry them to other machines",
    "version": "versions, processor, GPU and the directory of what was compiled",
    "completion": "a script that completes commands and flags in bash, zsh or fish",
}


def commands_of(package: str) -> dict[str, str]:
    """The table of a group of commands."""
    return importlib.import_module(package).COMMANDS


def module_of(package: str, name: str) -> ModuleType:
    """The file of the command ``name`` of ``package``, or the package of a group of commands."""
    return importlib.import_module(f"{package}.{name.replace('-', '_')}")
