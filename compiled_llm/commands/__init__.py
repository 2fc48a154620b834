"""The commands of ``compiled-llm``: a file each, with ``main(program, arguments) -> exit status``."""

# Name -> what it does, in a line of ``compiled-llm --help``. A command's file is imported when the command runs.
COMMANDS = {
    "batch": "serve files of rows, and write a result for each",
    "exact": "prove that a request's bits do not depend on how it is served",
    "report": "what a run did, what quantisation costs, what a GPU would run",
    "quantize": "write a quantised checkpoint, calibrated on a text",
    "tune": "find bucket sizes, or kernels' tiles, that suit this machine and work",
    "compile": "compile a model's graphs ahead of serving, or carry them to other machines",
}
