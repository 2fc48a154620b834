"""PrefixRouter: ``routing/``'s router as the request router of a deployment of Ray Serve.

All that this package uses of Ray Serve's interface of request routers is here; it is "alpha" in Ray 2.60, and
tests/ray_serve/test_request_router.py holds it. Ray Serve copies this module into the processes that send requests.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from compiled_llm.routing.router import RoutedPrompt, Router
from compiled_llm.server import messages  # as a module: it is not copied with this one
from compiled_llm.server.replicas import num_expected_tokens
from compiled_llm.system.child_process import LENGTH_BYTES

_KEPT_PROMPTS = 64  # of requests that have no engine yet; of more a prompt is read again
METHOD = "generate"  # calls of it are routed by their prompt; its first argument is a message with its length


class PrefixRouter(RequestRouter):
    """A prompt goes to the engine that holds the longest part of it, as far as this process has sent it there.

    An engine's ``record_replica_metadata`` says what it has room for, block_size, num_blocks and num_adapters, and the
    digest of its arguments.
    """

    def initialize_state(self, max_load_difference: int) -> None:
        """Called by Ray Serve with ``request_router_kwargs``. ``max_load_difference``: as ``ServerSettings`` has it."""
        self._most_imbalance = max_load_difference
        self._prefixes: Router | None = None
        self._prompt_of = functools.lru_cache(_KEPT_PROMPTS)(self._read_prompt)
        self._sent: dict[str, tuple[ReplicaID, int]] = {}  # requests with an engine, and the tokens it has for them
        self._loads: dict[ReplicaID, int] = {}

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Called by Ray Serve when engines come and go."""
        super().update_replicas(list(replicas))
        for replica in replicas:
            if replica.replica_id not in self._loads:
                self._add(replica.replica_id, replica.replica_metadata)
        running = {replica.replica_id for replica in replicas}
        self._loads = {name: load for name, load in self._loads.items() if name in running}

    def _add(self, name: ReplicaID, metadata: Mapping[str, Any]) -> None:
        if self._prefixes is None:
            self._prefixes = Router(metadata["block_size"], self._most_imbalance)
        self._prefixes.add(name, metadata["num_blocks"], metadata["num_adapters"])
        self._loads[name] = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best engine, and the others for when it takes no more requests.

        Calls say in their last argument what arguments an engine must have: in an update there are two kinds for a
        while. A prompt for which none is left goes to any, which refuses it; other calls wait for one.
        """
        if pending_request is None:
            return [candidate_replicas]
        digest = pending_request.args[-1]
        fitting = [one for one in candidate_replicas if one.replica_metadata.get("digest") == digest]
        if pending_request.metadata.call_method != METHOD:
            return [fitting]
        known = {one.replica_id: one for one in fitting if one.replica_id in self._loads}
        if not known:
            return [candidate_replicas]
        assert self._prefixes is not None
        prompt, _ = self._prompt_of(pending_request.args[0])
        best = self._prefixes.choose(prompt, {name: self._loads[name] for name in known})
        # From now on it counts as the engine's, though Ray Serve says so only when the engine has answered; else all
        # requests of a moment went to one.
        name = pending_request.metadata.internal_request_id
        self._send(name, best, pending_request)
        pending_request.future.add_done_callback(lambda future: self._drop(name) if future.cancelled() else None)
        return [[known[best]], [replica for name, replica in known.items() if name != best]]

    def _send(self, name: str, replica: ReplicaID, pending: PendingRequest) -> None:
        """A request is an engine's."""
        self._drop(name)
        assert self._prefixes is not None
        prompt, num_output = self._prompt_of(pending.args[0])
        num_tokens = self._prefixes.send(replica, prompt) + num_output
        self._sent[name] = replica, num_tokens
        self._loads[replica] += num_tokens

    def _drop(self, name: str) -> None:
        """A request is no engine's."""
        if name in self._sent:
            replica, num_tokens = self._sent.pop(name)
            if replica in self._loads:
                self._loads[replica] -= num_tokens

    def _read_prompt(self, frame: bytes) -> tuple[RoutedPrompt, int]:
        """The prompt of a message, and tokens of its output, about."""
        assert self._prefixes is not None
        request = messages.decode_for_engine(frame[LENGTH_BYTES:])
        assert isinstance(request, messages.Generate)
        adapter = "" if request.adapter is None else request.adapter.path
        prompt = RoutedPrompt.of(request.prompt_token_ids, self._prefixes.block_size, adapter, request.cache_salt)
        return prompt, num_expected_tokens(request)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve when an engine has taken a request."""
        name = pending_request.metadata.internal_request_id
        if name in self._sent and self._sent[name][0] != replica_id and replica_id in self._loads:
            self._send(name, replica_id, pending_request)  # the best one took no more

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve when a request has ended, however it ended."""
        self._drop(internal_request_id)
