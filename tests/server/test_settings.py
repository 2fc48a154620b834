"""The server's own arguments."""

from pathlib import Path
from typing import Any

import pytest

from compiled_llm.parsing.formats import CALL_ALIASES, CALL_FORMATS, REASONING_ALIASES, REASONING_FORMATS
from compiled_llm.server.settings import ServerSettings

TLS = Path(__file__).with_name("tls")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"port": 65536}, "port must be an integer from 0 to 65535, given 65536"),
        ({"host": ""}, "host must be an address"),
        ({"max_body_bytes": 10}, "max_body_bytes must be an integer from 1024"),
        ({"drain_seconds": -1}, "drain_seconds must be a number from 0.0"),
        ({"client_seconds": 0}, "client_seconds must be a number from 0.1"),
        ({"api_key": ("",)}, "api_key must be a list of names"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile needs ssl_certfile"),
        ({"ssl_certfile": "none.pem"}, "ssl_certfile must be a file in PEM form, given 'none.pem', which is none"),
        ({"ssl_certfile": str(TLS / "certificate.pem"), "ssl_keyfile": "/dev/null"}, "ssl_keyfile must be a file"),
        ({"ssl_certfile": str(TLS / "key.pem")}, "must be a certificate and its private key in PEM form, given"),
        ({"ssl_certfile": str(TLS / "certificate.pem")}, "must be a certificate and its private key in PEM form"),
        ({"tool_call_parser": "hermess"}, "llama3_json, given 'hermess': did you mean 'hermes'?"),
        ({"reasoning_parser": "qwen"}, "reasoning_parser must be one of auto, none, gpt_oss,"),
        ({"tool_call_parser": None}, "tool_call_parser must be one of auto, none, gpt_oss,"),
        ({"ports": 1}, "unknown server argument 'ports': did you mean 'port'?"),
    ],
)
def test_what_is_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        ServerSettings(**arguments).tls()
    assert words in str(refused.value)


def test_other_servers_names_of_formats_are_understood() -> None:
    for aliases, formats in ((CALL_ALIASES, CALL_FORMATS), (REASONING_ALIASES, REASONING_FORMATS)):
        assert not aliases.keys() & formats.keys()
        assert set(aliases.values()) <= formats.keys()
    settings = ServerSettings(tool_call_parser="openai", reasoning_parser="openai_gptoss")
    assert (settings.tool_call_parser, settings.reasoning_parser) == ("gpt_oss", "gpt_oss")
    assert ServerSettings(tool_call_parser="qwen25").tool_call_parser == "hermes"
    assert ServerSettings(tool_call_parser="none").tool_call_parser == "none"
