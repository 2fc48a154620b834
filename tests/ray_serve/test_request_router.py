"""The request router against Ray Serve's own classes: that these are still what it needs, and what it chooses.

Without a cluster: Ray Serve's replicas are played. Where its extra is not installed there is nothing to hold.
"""

import asyncio
import concurrent.futures
import inspect
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs the extra 'ray-serve'", exc_type=ImportError)

import ray.serve.request_router as of_ray
from ray.serve.config import RequestRouterConfig

from compiled_llm.ray_serve.arguments import Arguments, engine_config, engine_options
from compiled_llm.ray_serve.request_router import PrefixRouter
from compiled_llm.server.messages import Generate, encode
from compiled_llm.system.child_process import framed
from tests.ray_serve.test_arguments import ClusterOf


class Replica:
    def __init__(self, name: str, digest: str = "digest") -> None:
        self.replica_id = name
        self.replica_metadata = {"block_size": 16, "num_blocks": 64, "num_adapters": 0, "digest": digest}


class Pending:
    def __init__(self, name: str, start: int, method: str = "generate") -> None:
        request = Generate(name, [*range(start, start + 80)], {"max_tokens": 10})
        self.args = [framed(encode(request)), "digest"]
        self.future: Any = concurrent.futures.Future()
        self.metadata = type("Metadata", (), {"internal_request_id": name, "call_method": method})


class PlayedRouter(PrefixRouter):
    def __init__(self, max_load_difference: int) -> None:
        self.initialize_state(max_load_difference=max_load_difference)


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_ray.RequestRouter, "update_replicas", lambda self, replicas: None)


def choice(router: Any, replicas: list[Any], pending: Any) -> list[list[str]]:
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    return [[replica.replica_id for replica in rank] for rank in ranks]


def test_a_prompt_goes_to_the_engine_that_was_sent_its_prefix_unless_it_is_too_busy() -> None:
    router: Any = PlayedRouter(max_load_difference=200)
    replicas: Any = [Replica("a"), Replica("b"), Replica("c")]
    router.update_replicas(replicas)
    requests = [Pending(str(number), 0 if number < 3 else 500 * number) for number in range(5)]
    assert choice(router, replicas, requests[0]) == [["a"], ["b", "c"]]
    assert router._loads == {"a": 90, "b": 0, "c": 0}, "at once, before the engine has answered"
    router.on_request_routed(requests[0], "a", None)
    assert router._loads == {"a": 90, "b": 0, "c": 0}
    for request in requests[1:3]:
        assert choice(router, replicas, request)[0] == ["a"]
    assert router._loads["a"] == 90 + 2 * (16 + 10), "what it holds is not to be computed"
    assert choice(router, replicas, requests[3])[0] == ["b"]
    router.on_request_routed(requests[3], "a", None)
    assert router._loads == {"a": 232, "b": 0, "c": 0}, "the one that took it"
    assert choice(router, replicas, Pending("5", 0))[0] != ["a"]
    for name in "01235":
        router.on_request_completed("a", name)
    assert router._loads == {"a": 0, "b": 0, "c": 0}
    assert choice(router, replicas[1:2], Pending("6", 0)) == [["b"], []], "of those that are offered"
    requests[4].future.cancel()
    assert choice(router, replicas, requests[4])[0] != ["b"]
    assert router._loads == {"a": 0, "b": 90, "c": 0}, "nobody waits for it"


def test_engines_that_come_and_go_and_calls_that_are_no_prompts() -> None:
    router: Any = PlayedRouter(max_load_difference=200)
    first, second = Replica("a"), Replica("b")
    assert choice(router, [], None) == [[]]
    router.update_replicas([first])
    request = Pending("1", 0)
    assert choice(router, [first], request) == [["a"], []]
    router.update_replicas([second])
    assert router._loads == {"b": 0}
    router.on_request_completed("a", "1")
    assert router._loads == {"b": 0}
    assert choice(router, [first, second], Pending("2", 0)) == [["b"], []]
    router.on_request_routed(Pending("2", 0), "a", None)
    assert router._loads == {"b": 90}, "one that is gone takes nothing"
    other = Pending("3", 0, "describe")
    assert choice(router, [first, second], other) == [["a", "b"]]
    router.on_request_routed(other, "b", None)
    assert router._loads == {"b": 90}


def test_engines_with_other_arguments_are_the_last_choice() -> None:
    router: Any = PlayedRouter(max_load_difference=200)
    old, new = Replica("a", "other"), Replica("b")
    router.update_replicas([old, new])
    assert choice(router, [old, new], Pending("1", 0)) == [["b"], []]
    assert choice(router, [old], Pending("2", 0)) == [["a"]], "which refuses it"
    assert choice(router, [old], Pending("3", 0, "describe")) == [[]], "it waits"
    assert choice(router, [old, new], Pending("4", 0, "describe")) == [["b"]]


def test_ray_serve_calls_these_with_these_arguments() -> None:
    for name in ("initialize_state", "update_replicas", "choose_replicas", "on_request_routed", "on_request_completed"):
        theirs = inspect.signature(getattr(of_ray.RequestRouter, name)).parameters
        ours = inspect.signature(PrefixRouter.__dict__[name]).parameters
        if name != "initialize_state":  # which takes what the configuration gives
            assert list(ours) == list(theirs), name
    fields = of_ray.PendingRequest.__dataclass_fields__
    assert {"args", "metadata", "future"} <= set(fields)
    for name in ("replica_id", "replica_metadata"):
        assert isinstance(getattr(of_ray.RunningReplica, name), property)


def test_ray_serve_takes_the_options_and_can_send_the_router() -> None:
    serve = pytest.importorskip("ray.serve")
    arguments = Arguments.read({"replicas": {"max_replicas": 3}})
    options = engine_options(arguments, engine_config(arguments, ClusterOf(4)))
    deployment = serve.deployment(**options)(type("Engine", (), {}))
    assert deployment.options(**options)._deployment_config.autoscaling_config.max_replicas == 3
    config = RequestRouterConfig(**options["request_router_config"])
    assert b"choose_replicas" in config.get_serialized_request_router_cls(), "the class itself, not its name"
    assert config.get_request_router_class().__name__ == "PrefixRouter"
