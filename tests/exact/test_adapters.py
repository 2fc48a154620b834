"""Requests of several adapters in the matrix: equal; what is planted into their way is found."""

import pytest

from compiled_llm.adapters.host_adapters import HostAdapters
from compiled_llm.exact.check import Plan
from compiled_llm.exact.matrix import Outcome, run_matrix
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.request import Request
from tests.adapters.made import linear_modules, write_adapter
from tests.exact.plans import plan_of, uncompiled
from tests.exact.test_check import check_equal
from tests.families import checkpoint, transformers_model


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    directory, modules = tmp_path_factory.mktemp("adapters"), linear_modules(transformers_model("qwen3"))
    adapters = [str(write_adapter(directory / str(i), modules, seed=i, r=(8, 3)[i])) for i in range(2)]
    return uncompiled(plan_of(checkpoint("qwen3"), caches=["auto"], num_requests=7, num_tokens=5, adapters=adapters))


def test_adapters_are_equal_in_all_settings(plan: Plan) -> None:
    check_equal(plan, 35, 150)


def test_one_that_is_not_loaded_again_is_found(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    load, seen = HostAdapters.load, set[str]()

    def load_once(self: HostAdapters, slot: int, digest: str) -> None:
        if digest not in seen:
            load(self, slot, digest)
        seen.add(digest)

    monkeypatch.setattr(HostAdapters, "load", load_once)
    assert any(outcome.differing for outcome in unhurried(plan))


def test_blocks_of_other_adapters_are_found(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache leaves the adapter out."""
    digests = PrefixCache._digests

    def without_adapter(self: PrefixCache, request: Request, count: int) -> list[bytes]:
        adapter, request.adapter = request.adapter, ""
        try:
            return digests(self, request, count)
        finally:
            request.adapter = adapter

    monkeypatch.setattr(PrefixCache, "_digests", without_adapter)
    assert any(outcome.differing for outcome in unhurried(plan))


def test_what_did_not_come_about_is_no_proof(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slot for each adapter none is evicted."""
    monkeypatch.setitem(plan.arguments, "max_loras", 2)
    assert {outcome.missing for outcome in unhurried(plan)} == {"no adapter was evicted and loaded again"}


def unhurried(plan: Plan) -> list[Outcome]:
    """Of settings without preemptions, and the shorter requests."""
    settings = [setting for setting in plan.settings if setting.way == "not preempted"]
    return list(run_matrix(settings, plan.requests[:6], plan.engine))
