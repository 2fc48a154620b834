"""``compiled-llm serve --ray``: Ray Serve and the application are started on a cluster, and ended by a signal."""

import dataclasses
import importlib
import sys
import time
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.offline.ray_workers import RayCluster
from compiled_llm.ray_serve.arguments import Arguments, Replication
from compiled_llm.server.settings import ServerSettings
from compiled_llm.system.process import StopSignals

APPLICATION = "compiled-llm"  # its name in Ray Serve
_LOOK_SECONDS = 0.5
_OF_PROXY = ("host", "port", "ssl_certfile", "ssl_keyfile")


def serve_on_ray(
    program: str,
    address: str,
    config: EngineConfig,
    settings: ServerSettings,
    replicas: Replication,
    signals: StopSignals,
) -> int:
    """Serve until a signal comes. Returns the exit status.

    Args:
        address: of the cluster, as ``RayCluster`` has it.

    Raises:
        ValueError: an argument does not allow it, no cluster answers, or Ray Serve runs there already.
    """
    proxy = {name: getattr(settings, name) or None for name in _OF_PROXY}
    defaults = {field.name: field.default for field in dataclasses.fields(settings) if field.name in _OF_PROXY}
    arguments = Arguments(config, dataclasses.replace(settings, **defaults), replicas)  # type: ignore[arg-type]
    cluster = RayCluster(address)
    try:
        serve: Any = importlib.import_module("ray.serve")
    except ImportError as error:
        cluster.close()
        raise ValueError("--ray needs the extra 'ray-serve': pip install 'compiled-llm[server,ray-serve]'") from error
    try:
        with signals.gracefully():
            return _serve(program, serve, arguments, proxy, signals)
    finally:
        cluster.close()


def _serve(program: str, serve: Any, arguments: Arguments, proxy: dict[str, Any], signals: StopSignals) -> int:
    from compiled_llm.ray_serve.application import application

    def say(text: str) -> None:
        print(f"{program}: {text}", file=sys.stderr, flush=True)

    if serve.status().proxies:
        raise ValueError(
            "--ray must name a cluster on which Ray Serve does not run yet: give it a file by 'serve deploy', or end "
            "it by 'serve shutdown'"
        )
    serve.start(proxy_location="HeadOnly", http_options=proxy)
    try:
        serve.run(application(arguments), name=APPLICATION, route_prefix="/", blocking=False)
    except RuntimeError as error:
        say(f"error: {error}")
        serve.shutdown()
        return 1
    names = ", ".join(arguments.server.served_model_name or (arguments.name,))
    scheme = "https" if proxy["ssl_certfile"] else "http"
    say(f"serves {names} at {scheme}://{proxy['host']}:{proxy['port']} on the head of the Ray cluster")
    while signals.number is None:
        time.sleep(_LOOK_SECONDS)
    say(f"ends when all answers have ended, in {arguments.server.drain_seconds:g} s at the latest")
    serve.delete(APPLICATION)  # waits for answers, which the next call does not
    serve.shutdown()
    return 0
