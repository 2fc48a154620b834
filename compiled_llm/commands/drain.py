"""Move the requests of one engine of a server to its others.

    compiled-llm drain http://127.0.0.1:8000 --engine 1 --grace-seconds 5
    compiled-llm drain http://127.0.0.1:8000 --engine 1 --undo

The server was started with --allow-drain and several engines. The engine gets no requests from then on, and those that
it has go on elsewhere, with the same tokens: their KV blocks go along as far as they are ready in time, and other
tokens are computed again. Streams of clients go on. See docs/roles.md.

Exit status: 0, 2 where the server refuses it or does not answer.
"""

import os
from collections.abc import Sequence

from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import run_program

_KEY_VARIABLE = "COMPILED_LLM_API_KEY"


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Move the requests of one engine of a server to its others.")
    made.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    made.add_argument("--engine", type=int, required=True, metavar="N", help="its number, from 0")
    made.add_argument("--grace-seconds", type=float, default=5.0, help="that its KV blocks may take (default: 5)")
    made.add_argument("--undo", action="store_true", help="let requests go to it again instead")
    made.add_argument("--api-key", metavar="KEY", help=f"of the server; without it the environment's {_KEY_VARIABLE}")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""

    def run(stdout: GuardedStream, signals: StopSignals) -> int:
        args = parser(program).parse_args(arguments)
        with errors_end(program):
            from compiled_llm.terminal.server_client import ServerClient

            key = args.api_key or os.environ.get(_KEY_VARIABLE, "").split(",")[0] or None
            body = {"engine": args.engine, "grace_seconds": args.grace_seconds}
            answer = ServerClient(args.url, key).post("/undrain" if args.undo else "/drain", body)
        what = "gets requests again" if args.undo else f"is drained: {answer['moved']} requests moved"
        stdout.write(f"engine {args.engine} {what}\n")
        return 0

    return run_program(program, run)
