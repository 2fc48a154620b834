"""What the builder's arguments become for Ray Serve; no cluster is started, and Ray is not imported."""

import ast
from typing import Any

import pytest
import yaml

from compiled_llm.offline.ray_workers import RayCluster
from compiled_llm.ray_serve.arguments import Arguments, engine_config, engine_options, server_options
from compiled_llm.ray_serve.autoscaling import KV_USE, QueueAndKvUse
from tests.docs.markdown import ROOT


class ClusterOf(RayCluster):
    """One that is made up: machines with so many cores each, without GPUs unless they are said."""

    def __init__(self, *cores: int, gpus: int = 0) -> None:
        self._machines, self._gpus = list(cores), gpus

    def _cores(self) -> list[int]:
        return self._machines

    def device_type(self, device: str) -> str:
        return "cuda" if self._gpus and device == "auto" else "cpu"


def options(cluster: RayCluster, **sections: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    arguments = Arguments.read(sections)
    config = engine_config(arguments, cluster)
    return config, engine_options(arguments, config)


def test_engines_ask_for_their_cores_and_share_a_machines_memory() -> None:
    config, asked = options(ClusterOf(8, 8), server={"data_parallel_size": 4}, engine={"num_kv_blocks": 64})
    assert (config["num_threads"], config["num_kv_blocks"]) == (4, 64)
    assert config["gpu_memory_utilization"] == pytest.approx(Arguments.read({}).engine.gpu_memory_utilization / 2)
    assert asked["num_replicas"] == 4
    assert asked["ray_actor_options"] == {"num_cpus": 4}
    assert "placement_group_bundles" not in asked
    config, asked = options(ClusterOf(8, gpus=2))
    assert (config["device"], config["num_threads"]) == ("cuda", None)
    assert asked["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 1}


def test_ranks_of_an_engine_have_a_placement_group_on_one_machine() -> None:
    config, asked = options(ClusterOf(8, 8), engine={"tensor_parallel_size": 2}, server={"data_parallel_size": 2})
    assert config["num_threads"] == 4, "of a rank"
    assert asked["ray_actor_options"] == {"num_cpus": 4}
    assert asked["placement_group_bundles"] == [{"CPU": 4}, {"CPU": 4}]
    assert asked["placement_group_strategy"] == "STRICT_PACK"


def test_ranks_on_gpus_have_all_of_them_in_the_engines_actor() -> None:
    """It sees those that it asks for itself, and none that a placement group holds besides."""
    _, asked = options(ClusterOf(8, gpus=4), engine={"tensor_parallel_size": 2})
    assert asked["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 2}
    assert "placement_group_bundles" not in asked


def test_autoscaling_and_draining() -> None:
    replicas = {"max_replicas": 6, "target_requests": 8, "target_kv_use": 0.5}
    server = {"data_parallel_size": 2, "drain_seconds": 20, "max_load_difference": 7}
    _, asked = options(ClusterOf(8), server=server, replicas=replicas)
    scaling = asked["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (2, 6, 8)
    assert scaling["policy"]["policy_kwargs"] == {"target_kv_use": 0.5}
    assert "num_replicas" not in asked
    assert asked["request_router_config"]["request_router_kwargs"] == {"max_load_difference": 7}
    of_server = server_options(Arguments.read({"server": server}))
    assert asked["graceful_shutdown_timeout_s"] == of_server["graceful_shutdown_timeout_s"] > 20


def test_the_file_of_the_docs() -> None:
    (application,) = yaml.safe_load((ROOT / "docs" / "deploy" / "ray-serve.yaml").read_text())["applications"]
    arguments = Arguments.read(application["args"])
    assert (arguments.engine.model, arguments.server.served_model_name) == ("/models/my-model", ("my-model",))
    assert (arguments.server.data_parallel_size, arguments.most_replicas) == (2, 8)
    module, _, name = application["import_path"].partition(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engines": {}}, "args must be sections among engine, server, replicas, given engines"),
        ({"engine": 3}, "args must be sections among .* given engine: 3"),
        ({"replicas": {"most": 3}}, "replicas must have names among max_replicas, .* given most"),
        ({"replicas": {"max_replicas": 0}}, "max_replicas must be from 1 to 1024, given 0"),
        ({"replicas": {"target_requests": 0}}, "target_requests must be above 0, given 0"),
        ({"replicas": {"target_kv_use": 2}}, "target_kv_use must be above 0 and at most 1, given 2"),
        ({"replicas": {"max_replicas": 1}, "server": {"data_parallel_size": 2}}, "at least data_parallel_size, 2"),
        ({"server": {"port": 80}}, "port must not be given with Ray Serve: give port in http_options"),
        ({"server": {"restart_engine": True}}, "restart_engine must not be given with Ray Serve"),
        ({"server": {"lora_modules": ["a=b"]}}, "enable_lora"),
        ({"engine": {"no": 1}}, "no"),
    ],
)
def test_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arguments.read(sections)


class Context:
    """What Ray Serve tells an autoscaling policy."""

    def __init__(self, requests: float, *used: float) -> None:
        self.total_num_requests, self.aggregated_metrics = requests, {KV_USE: dict(enumerate(used))} if used else None
        self.config = type("Config", (), {"target_ongoing_requests": 4})


def test_engines_are_as_many_as_requests_or_kv_blocks_ask_for() -> None:
    policy = QueueAndKvUse(0.5)
    assert policy(Context(12))[0] == 3, "nothing is known of KV blocks yet"
    assert policy(Context(12, 0.1, 0.1))[0] == 3
    assert policy(Context(2, 0.9, 0.8))[0] == pytest.approx(3.4)
    assert policy(Context(0, 0.0))[0] == 0
