"""The application of Ray Serve, and the builder ``app`` that a configuration file names."""

from typing import Any

from ray import serve

from compiled_llm.offline.ray_workers import RayCluster
from compiled_llm.ray_serve.arguments import Arguments, engine_config, engine_options, server_options
from compiled_llm.ray_serve.deployments import Engine, Server


def app(args: dict[str, Any]) -> serve.Application:
    """The application of ``args``, as ``Arguments.read`` has them. ``import_path`` of a file names this function."""
    return application(Arguments.read(args))


def application(arguments: Arguments) -> serve.Application:
    """For the cluster that this process is connected to. ``ValueError``: an argument does not allow it."""
    config, settings = engine_config(arguments, RayCluster.joined()), arguments.server
    engines = serve.deployment(Engine, **engine_options(arguments, config)).bind(config, settings)
    server = serve.deployment(serve.ingress()(Server), **server_options(arguments))
    return server.bind(engines, config, settings, arguments.name)
