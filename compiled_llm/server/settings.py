"""ServerSettings: what the server listens to, whom it answers, and what it allows, besides the engine's arguments."""

import dataclasses
import os
import ssl
from collections.abc import Iterable, Mapping

from compiled_llm.api.argument_checks import check_fields, names
from compiled_llm.api.lora_request import read_lora_modules
from compiled_llm.api.names import did_you_mean, refuse_unknown_names
from compiled_llm.parsing.formats import AUTO, CALL_ALIASES, CALL_FORMATS, NONE, REASONING_ALIASES, REASONING_FORMATS

DEMO_NAME = "compiled-llm-demo"


@refuse_unknown_names("server argument", {})
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Out of range: ``ValueError`` with the name, what is allowed and what was given.

    Attributes:
        host: address to listen on; 0.0.0.0 is every one of the machine's.
        port: 0 takes a free one.
        served_model_name: what clients call the model, and answers name; given several times, each is a name of it.
        tool_call_parser: how the model writes tool calls; auto: as its chat template tells; none: tools are refused.
            Names of vLLM and SGLang for the same formats are names of them, too.
        reasoning_parser: how the model writes its reasoning; auto: as its chat template tells; none: it is content.
        lora_modules: adapters that are served from the start, each NAME=PATH; clients give NAME as their model. Also
            {"name": NAME, "path": PATH, "base_model_name": NAME of the model}. Needs --enable-lora.
        allow_lora_updates: there are also /v1/load_lora_adapter and /v1/unload_lora_adapter, with which a client names
            directories of this machine that are read. Needs --enable-lora.
        data_parallel_size: engines that serve the model side by side, each in a process of its own, with its share of a
            CPU's cores and memory or a GPU of its own. A prompt goes to the one that holds the longest part of it.
        prefill_replicas: further engines, which compute prompts alone: the others take the KV blocks from them, so that
            long prompts do not hold up who is being answered. See docs/roles.md.
        min_prefill_tokens: of a prompt, not known to the engine that is to answer, from which on it goes there.
        max_prefill_seconds: after which a prompt is computed where it is answered instead.
        max_load_difference: tokens that an engine may have to compute still, above the least busy one's, and get a
            prompt that it holds a part of. Of each output 256 count at most.
        api_key: a request needs one of these, as a bearer token or in the header x-api-key; none: all are answered.
            Other users of the machine see it on the command line: give --api-key-file, or COMPILED_LLM_API_KEY.
        ssl_certfile: a certificate in PEM form, and those that lead to it: clients then find the server at https.
        ssl_keyfile: its private key in PEM form, not encrypted; none: it is in ssl_certfile.
        cors_origin: pages of this origin may use the server from a browser; none: no page of another origin may.
        max_body_bytes: of a request.
        max_header_bytes: of a request's line and headers together.
        max_waiting_requests: prompts that may wait while as many as can run do; a client of one more is told to come
            again.
        max_completions: prompts of a request times its n.
        max_request_seconds: from a request's arrival to the end of its answer.
        client_seconds: that a client may take to send a request, and to read what was sent to it.
        max_stored_responses: answers of /v1/responses that are kept, so that clients can go on with them; 0: none.
        max_stored_bytes: of them together, with the conversations that led to them.
        stored_seconds: for which one is kept.
        keep_alive_seconds: without an event, after which a stream has a comment, lest a proxy takes it for dead; 0:
            never.
        drain_seconds: for answers that are under way when the server is told to end.
        allow_drain: there are also /drain and /undrain, with which a client moves the requests of one engine to others,
            or those of all to another server, which ends this one; and /take_over, for requests of another server. KV
            blocks go along if the engines have kv_host_bytes. See docs/roles.md.
        dev: there are also /reset_prefix_cache and /abort, with which a client changes what others get.
        stall_seconds: without a step while requests wait, after which /health says that the engine hangs.
        restart_engine: start an engine again when its process has ended, 5 times within 10 minutes at most; without
            it, the others serve on, and the end of the last one ends the server.
        otlp_traces_endpoint: a collector of OpenTelemetry, which gets a span for each prompt that was answered, such as
            http://localhost:4318/v1/traces; none: no traces.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    lora_modules: tuple[str, ...] = ()
    allow_lora_updates: bool = False
    data_parallel_size: int = 1
    prefill_replicas: int = 0
    min_prefill_tokens: int = 256
    max_prefill_seconds: float = 60.0
    max_load_difference: int = 4096
    api_key: tuple[str, ...] = ()
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    cors_origin: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_header_bytes: int = 2**16
    max_waiting_requests: int = 1024
    max_completions: int = 1024
    max_request_seconds: float = 3600.0
    client_seconds: float = 60.0
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20
    stored_seconds: float = 3600.0
    keep_alive_seconds: float = 15.0
    drain_seconds: float = 30.0
    allow_drain: bool = False
    dev: bool = False
    stall_seconds: float = 120.0
    restart_engine: bool = False
    otlp_traces_endpoint: str = ""

    def __post_init__(self) -> None:
        check_fields(self, _INTEGERS, _NUMBERS)
        for name in ("served_model_name", "lora_modules", "api_key", "cors_origin"):
            object.__setattr__(self, name, names(name, getattr(self, name)))
        read_lora_modules(self.lora_modules)
        self._check_parser("tool_call_parser", CALL_FORMATS, CALL_ALIASES)
        self._check_parser("reasoning_parser", REASONING_FORMATS, REASONING_ALIASES)
        if not isinstance(self.host, str) or not self.host:
            raise ValueError(f"host must be an address or a name of this machine, given {self.host!r}")

    def _check_parser(self, name: str, formats: Iterable[str], aliases: Mapping[str, str]) -> None:
        given, allowed = str(getattr(self, name)), (AUTO, NONE, *formats)
        if given not in (*allowed, *aliases):
            hint = did_you_mean(given, (*allowed, *aliases))
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, given {given!r:.100}{hint and ': ' + hint}")
        object.__setattr__(self, name, aliases.get(given, given))

    def tls(self) -> ssl.SSLContext | None:
        """For connections; None without a certificate. ``ValueError``: the files are no certificate and its key."""
        if not self.ssl_certfile:
            if self.ssl_keyfile:
                raise ValueError(f"ssl_keyfile needs ssl_certfile, given {self.ssl_keyfile!r} alone")
            return None

        def refuse() -> str:  # else OpenSSL asks for a password on the terminal
            raise ValueError(f"ssl_keyfile must not be encrypted, given {self.ssl_keyfile or self.ssl_certfile!r}")

        for name in ("ssl_certfile", "ssl_keyfile"):  # a pipe that nobody writes to would be waited for
            path = getattr(self, name)
            if path and not os.path.isfile(path):
                raise ValueError(f"{name} must be a file in PEM form, given {path!r}, which is none")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile or None, refuse)
        except OSError as error:  # of the files, or of what is in them
            raise ValueError(
                f"ssl_certfile and ssl_keyfile must be a certificate and its private key in PEM form, given "
                f"{self.ssl_certfile!r} and {self.ssl_keyfile!r}: {error}"
            ) from error
        return context


_INTEGERS = {
    "port": (0, 65535),
    "data_parallel_size": (1, 1024),
    "prefill_replicas": (0, 1023),
    "min_prefill_tokens": (1, 2**31 - 1),
    "max_load_difference": (0, 2**31 - 1),
    "max_body_bytes": (1024, 2**31 - 1),
    "max_header_bytes": (1024, 2**24),
    "max_waiting_requests": (0, 2**20),
    "max_completions": (1, 2**16),
    "max_stored_responses": (0, 2**20),
    "max_stored_bytes": (0, 2**40),
}
_NUMBERS = {
    "max_prefill_seconds": (0.1, 10**6),
    "max_request_seconds": (0.1, 10**6),
    "client_seconds": (0.1, 10**6),
    "stored_seconds": (0.0, 10**6),
    "keep_alive_seconds": (0.0, 10**6),
    "drain_seconds": (0.0, 10**6),
    "stall_seconds": (1.0, 10**6),
}
