"""Move the requests of one engine of a server to its others, or those of a server to another one.

    compiled-llm drain http://127.0.0.1:8000 --engine 1 --grace-seconds 5
    compiled-llm drain http://127.0.0.1:8000 --engine 1 --undo
    compiled-llm drain http://127.0.0.1:8000 --to http://127.0.0.1:8001

The server was started with --allow-drain. The engine gets no requests from then on, and those that it has go on
elsewhere, with the same tokens: their KV blocks go along as far as they are ready in time, and other tokens are
computed again. Streams of clients go on.

With --to, all requests of the server (or of one engine) go to another server with --allow-drain, the same model and the
same COMPILED_LLM_KV_KEY. The first one passes answers on, and ends, with status 0, when all are. See docs/roles.md.

Other users of the machine see keys on a command line, and not those of the environment.

Exit status: 0, 2 where the server refuses it or does not answer.
"""

import os
from collections.abc import Sequence
from typing import Any

from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import as_program

_KEY_VARIABLE, _TO_KEY_VARIABLE = "COMPILED_LLM_API_KEY", "COMPILED_LLM_TO_API_KEY"


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Move the requests of an engine, or of a server, to others.")
    made.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    made.add_argument("--engine", type=int, metavar="N", help="its number, from 0; may be left out with --to")
    made.add_argument("--to", metavar="URL2", help="another server that its requests go to")
    made.add_argument("--to-api-key", metavar="KEY", help=f"of that server; without it {_TO_KEY_VARIABLE}")
    made.add_argument("--grace-seconds", type=float, default=5.0, help="that its KV blocks may take (default: 5)")
    made.add_argument("--undo", action="store_true", help="let requests go to it again instead")
    made.add_argument("--api-key", metavar="KEY", help=f"of the server; without it the environment's {_KEY_VARIABLE}")
    return made


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_args(arguments)
    with errors_end(program):
        from compiled_llm.terminal.server_client import ServerClient

        key = args.api_key or os.environ.get(_KEY_VARIABLE, "").split(",")[0] or None
        if args.engine is None and (args.undo or args.to is None):
            raise ValueError("--engine must be given unless --to is, without --undo")
        if args.undo and (args.to or args.to_api_key):
            raise ValueError("--to and --to-api-key have no meaning with --undo")
        body: dict[str, Any] = {"engine": args.engine}
        if not args.undo:
            of_other = args.to_api_key or (args.to and os.environ.get(_TO_KEY_VARIABLE)) or None
            body |= {"grace_seconds": args.grace_seconds, "to": args.to, "to_api_key": of_other}
        answer = ServerClient(args.url, key).post("/undrain" if args.undo else "/drain", body)
    what = "gets requests again" if args.undo else f"is drained: {answer['moved']} requests moved"
    stdout.write(f"{'the server' if args.engine is None else f'engine {args.engine}'} {what}\n")
    return 0
