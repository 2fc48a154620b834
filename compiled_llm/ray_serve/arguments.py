"""What an application is made of: the arguments of its builder, and what they ask of a cluster."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.offline.ray_workers import RayCluster
from compiled_llm.ray_serve.autoscaling import QueueAndKvUse
from compiled_llm.server.adapters import check_lora_settings
from compiled_llm.server.settings import DEMO_NAME, ServerSettings

_SECTIONS = ("engine", "server", "replicas")
_LAST_SECONDS = 5.0  # after those for draining, until what still runs is ended
_HEALTH_SECONDS = 2.0  # between two looks at an engine; one that has died is replaced after that
_MOST_CALLS = 2**16  # Ray Serve's own bound: the server's bounds are below, and say 429
# What Ray Serve does in its own way -> what to give instead.
_OF_SERVE = {
    "max_header_bytes": "Ray Serve's proxy has its own bound",
    "restart_engine": "Ray Serve starts an engine again by itself",
    "allow_lora_updates": "engines that Ray Serve starts later would not know them; give lora_modules",
}
_OF_PROXY = {name: f"give {name} in http_options of the file" for name in ("host", "port")}
_OF_PROXY |= {name: f"give {name} in http_options of the file" for name in ("ssl_certfile", "ssl_keyfile")}


@dataclasses.dataclass(frozen=True)
class Replication:
    """How many engines there are; ``data_parallel_size`` of the server's arguments is how many at least.

    Attributes:
        max_replicas: engines at most; None: as many as at least, always.
        target_requests: of an engine, those that run and those that wait, above which there should be more engines.
        target_kv_use: share of an engine's KV blocks in use, above which there should be more engines.
    """

    max_replicas: int | None = None
    target_requests: float = 16.0
    target_kv_use: float = 0.7

    def __post_init__(self) -> None:
        if self.max_replicas is not None and not 1 <= self.max_replicas <= 1024:
            raise ValueError(f"max_replicas must be from 1 to 1024, given {self.max_replicas}")
        if self.target_requests <= 0:
            raise ValueError(f"target_requests must be above 0, given {self.target_requests}")
        QueueAndKvUse(self.target_kv_use)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of an application. Out of range: ``ValueError`` with the name, what is allowed and what was given."""

    engine: EngineConfig
    server: ServerSettings
    replicas: Replication

    def __post_init__(self) -> None:
        for name, remedy in _OF_SERVE.items():
            _refuse(self.server, name, remedy)
        check_lora_settings(self.server, self.engine)
        least, most = self.server.data_parallel_size, self.replicas.max_replicas
        if most is not None and most < least:
            raise ValueError(f"max_replicas must be at least data_parallel_size, {least}, given {most}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Arguments":
        """From ``args`` of a configuration file: sections "engine", "server" and "replicas", each may be missing."""
        for name, value in given.items():
            if name not in _SECTIONS or not isinstance(value, Mapping):
                raise ValueError(f"args must be sections among {', '.join(_SECTIONS)}, given {name}: {value!r:.100}")
        fields = {field.name for field in dataclasses.fields(Replication)}
        unknown = given.get("replicas", {}).keys() - fields
        if unknown:
            raise ValueError(f"replicas must have names among {', '.join(sorted(fields))}, given {min(unknown)}")
        server = ServerSettings(**given.get("server", {}))
        for name, remedy in _OF_PROXY.items():
            _refuse(server, name, remedy)
        return cls(EngineConfig(**given.get("engine", {})), server, Replication(**given.get("replicas", {})))

    @property
    def most_replicas(self) -> int:
        return self.replicas.max_replicas or self.server.data_parallel_size

    @property
    def name(self) -> str:
        """Of the model, unless the settings give it others."""
        return self.engine.model or DEMO_NAME


def _refuse(server: ServerSettings, name: str, remedy: str) -> None:
    field = next(field for field in dataclasses.fields(ServerSettings) if field.name == name)
    if getattr(server, name) != field.default:
        raise ValueError(f"{name} must not be given with Ray Serve: {remedy}")


def engine_config(arguments: Arguments, cluster: RayCluster) -> dict[str, Any]:
    """Arguments of each engine: its device, its share of a machine's cores, and of its memory on a CPU.

    Raises:
        ValueError: ``device`` is one GPU of several.
    """
    config = arguments.engine
    values: dict[str, Any] = {"device": cluster.device_type(config.device), "progress": "off"}
    if values["device"] == "cpu":
        threads = config.num_threads or cluster.cores_each(arguments.most_replicas * config.num_processes)
        together = cluster.most_together(arguments.most_replicas, threads * config.num_processes)
        values |= {"num_threads": threads, "gpu_memory_utilization": config.gpu_memory_utilization / together}
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} | values


def engine_options(arguments: Arguments, config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the deployment of engines. ``config``: of ``engine_config``."""
    replicas, server = arguments.replicas, arguments.server
    ranks = config["tensor_parallel_size"] * config["pipeline_parallel_size"]
    on_gpus = config["device"] != "cpu"
    needs = {"CPU": 1, "GPU": ranks} if on_gpus else {"CPU": config["num_threads"]}
    actor = {f"num_{name.lower()}s": number for name, number in needs.items()}
    options: dict[str, Any] = {"ray_actor_options": actor, "max_ongoing_requests": _MOST_CALLS}
    if ranks > 1 and not on_gpus:  # processes of one engine, on one machine; of GPUs an actor sees its own alone
        options |= {"placement_group_bundles": [needs] * ranks, "placement_group_strategy": "STRICT_PACK"}
    if replicas.max_replicas is None:
        options["num_replicas"] = server.data_parallel_size
    else:
        options["autoscaling_config"] = {
            "min_replicas": server.data_parallel_size,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_requests,
            "policy": {
                "policy_function": f"{QueueAndKvUse.__module__}:{QueueAndKvUse.__name__}",
                "policy_kwargs": {"target_kv_use": replicas.target_kv_use},
            },
        }
    options["request_router_config"] = {
        "request_router_class": "compiled_llm.ray_serve.request_router.PrefixRouter",
        "request_router_kwargs": {"max_load_difference": server.max_load_difference},
    }
    return options | _ending(server)


def server_options(arguments: Arguments) -> dict[str, Any]:
    """Options of the deployment that speaks HTTP, which needs no core of its own."""
    return {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": _MOST_CALLS, **_ending(arguments.server)}


def _ending(server: ServerSettings) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": server.drain_seconds + _LAST_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": _HEALTH_SECONDS,
    }
