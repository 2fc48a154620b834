"""The commands of ``compiled-llm``: a file each, with ``main(program, arguments) -> exit status``."""

# Name -> what it does, in a line of ``compiled-llm --help``. A command's file is imported when the command runs.
COMMANDS = {
    "bench": "measure the engine, its parts, and other engines beside it",
    "batch": "serve files of rows, and write a result for each",
}
