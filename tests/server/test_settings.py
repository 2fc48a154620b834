"""The server's own arguments."""

from pathlib import Path
from typing import Any

import pytest

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
        ({"ports": 1}, "unknown server argument 'ports': did you mean 'port'?"),
    ],
)
def test_what_is_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        ServerSettings(**arguments).tls()
    assert words in str(refused.value)
