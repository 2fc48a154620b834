"""Transfers: requests whose KV blocks come from another engine, or go to one. The engine's side of ``role``.

What goes with a request is vLLM's ``kv_transfer_params``, so that its proxies work: a prompt with ``do_remote_decode``
is computed here, and the output says where its blocks are; given to another engine as they are, these let it begin
there. Blocks are named by what they hold: ids are for reading alone. Who sends both at once chooses the name of the
prompt, ``remote_request_id``: the other engine then takes blocks while the prompt is computed.
"""

import dataclasses
import ipaddress
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from compiled_llm.api.argument_checks import integer
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.readable import shown
from compiled_llm.engine.completions import UserRequest
from compiled_llm.scheduling.request import BlockSource
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.tiers.exchange import BlockExchange
from compiled_llm.tiers.giver import LEASE_SECONDS

_GIVING_SECONDS = 1.0  # without a block given, after which a request ends all the same
_LEASE_BYTES = 32
_FIELDS = frozenset(
    (
        *("do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id"),
        *("remote_host", "remote_port", "tp_size", "pp_size", "dcp_size", "remote_num_tokens", "transfer_mode"),
    )
)


@dataclasses.dataclass
class _Giving:
    """A request whose blocks are to be taken: under this lease, of these digests.

    Attributes:
        num_left: that were not given yet when one was given last; ``late_at``: when no more are waited for.
    """

    lease: bytes
    digests: list[bytes]
    num_left: float = math.inf
    late_at: float = math.inf


class Transfers:
    """For one engine, whose ``exchange`` moves the blocks."""

    def __init__(self, config: EngineConfig, exchange: BlockExchange) -> None:
        self._peers, self._num_ranks, self.exchange = config.kv_transfer_peers, config.tensor_parallel_size, exchange
        self._to_give: Counter[bytes] = Counter()
        self._giving: dict[str, _Giving] = {}
        self._taking: dict[str, BlockSource] = {}
        self._engine_id = os.urandom(8).hex()
        self._tiers: KVTiers | None = None

    def enter(self, tiers: KVTiers) -> None:
        """A scheduler begins to work."""
        tiers.to_give, tiers.on_taken, self._tiers = self._to_give, self.exchange.end, tiers

    def check(self, params: Mapping[str, Any] | None) -> BlockSource | None:
        """The engine that a request is to take blocks from, which is connected to. May wait, in any thread.

        Raises:
            ValueError: these ``kv_transfer_params`` cannot be served.
        """
        if params is None:
            return None
        if not isinstance(params, Mapping) or params.keys() - _FIELDS:
            raise ValueError(
                f"kv_transfer_params must be a dict with names of {sorted(_FIELDS)}, given {shown(params)}"
            )
        for name in ("pp_size", "dcp_size"):
            if params.get(name) not in (None, 1):
                raise ValueError(f"{name} of kv_transfer_params must be 1 here, given {shown(params[name])}")
        if (ranks := params.get("tp_size")) is not None:  # a block is the same whatever it is
            integer("tp_size of kv_transfer_params", ranks, 1, 64)
        if params.get("do_remote_decode"):
            self.lease(params)
        if not params.get("do_remote_prefill"):
            return None
        lease = _lease(params)
        address = self._address(params.get("remote_host"), params.get("remote_port"))
        self.exchange.meet(address)
        return BlockSource(address, lease, is_early=not params.get("remote_block_ids"))

    def lease(self, params: Mapping[str, Any]) -> bytes:
        """Under which the blocks of a request are to be taken. ``ValueError``: it is none, or another request's."""
        giver = self.exchange.giver
        if giver is None:
            raise ValueError(
                "kv_transfer_params: do_remote_decode needs an engine with kv_transfer_address, given True"
            )
        if params.get("remote_request_id") is None:
            return os.urandom(_LEASE_BYTES)
        lease = _lease(params)
        if giver.has(lease):
            raise ValueError(
                "remote_request_id of kv_transfer_params must be no other request's, given "
                f"{shown(params['remote_request_id'])}"
            )
        return lease

    def _address(self, host: Any, port: Any) -> str:
        if isinstance(host, str) and host.startswith("unix:") and not port:
            return host
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
            raise ValueError(
                "remote_host and remote_port of kv_transfer_params must be an address, given "
                f"{shown(host)} and {shown(port)}"
            )
        try:
            is_own = ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_own = host == "localhost"
        if not is_own and host not in self._peers:
            raise ValueError(
                "remote_host of kv_transfer_params must be this machine, or one of the engine's kv_transfer_peers, "
                f"given {shown(host)}"
            )
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    # -- Requests

    def begin(self, entry: UserRequest, digests: list[bytes], lease: bytes | None) -> None:
        """A request was added, with so many full blocks. ``lease``: others are to take them under it."""
        source = entry.requests[0].source
        if source is not None:
            self._taking[entry.request_id] = source
            self.exchange.begin(source)
        if lease is not None:
            self.give(entry.request_id, digests, lease)

    def give(self, request_id: str, digests: list[bytes], lease: bytes | None = None) -> None:
        """Blocks of a request are to be taken, as soon as they are published. ``lease``: None: a new one."""
        assert self.exchange.giver is not None
        assert self._tiers is not None
        if request_id in self._giving:
            return
        giving = self._giving[request_id] = _Giving(lease or os.urandom(_LEASE_BYTES), digests)
        names = self._tiers.names(digests)
        self.exchange.giver.hold(giving.lease, names, None)
        self._to_give.update(names)
        self._tiers.give(digests)  # those that are there

    def may_end(self, entry: UserRequest, scheduler: Scheduler, move_blocks: Callable[[], object]) -> bool:
        """Whether nothing is left to do for a request, which may have ended: its blocks may be on their way to others.

        Where no step is under way or to come, some are moved here: what is to be done meanwhile does not wait for all.
        """
        if not entry.is_finished or scheduler.tiers is None:
            return True
        if self.has_given(entry.request_id, scheduler.tiers):
            return True
        if not (scheduler.in_flight or scheduler.has_unfinished_requests()):  # else the steps of others move them
            move_blocks()
        return self.has_given(entry.request_id, scheduler.tiers)

    def has_given(self, request_id: str, tiers: KVTiers) -> bool:
        """Whether all blocks of a request are given, or come no more."""
        giving = self._giving.get(request_id)
        if giving is None:
            return True
        num_left, now = tiers.give(giving.digests), time.monotonic()
        if num_left < giving.num_left:
            giving.num_left, giving.late_at = num_left, now + _GIVING_SECONDS
        return not num_left or now > giving.late_at

    def end(self, request_id: str, *, is_served: bool) -> dict[str, Any] | None:
        """A request has ended. Returns what lets another engine go on with it; None: nothing does.

        ``is_served``: else nobody will take its blocks.
        """
        source, giving = self._taking.pop(request_id, None), self._giving.pop(request_id, None)
        if source is not None:
            self.exchange.end(source)
        if giving is None:
            return None
        assert self._tiers is not None
        names = self._tiers.names(giving.digests)
        self._to_give.subtract(names)
        for digest in names:
            if not self._to_give[digest]:
                del self._to_give[digest]
        giver = self.exchange.giver
        assert giver is not None
        if not is_served:
            giver.release(giving.lease)
            return None
        giver.hold(giving.lease, names, LEASE_SECONDS)
        host, port = giver.address, 0
        if not host.startswith("unix:"):
            host, _, digits = host.rpartition(":")
            host, port = host.removeprefix("[").removesuffix("]"), int(digits)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [digest.hex()[:16] for digest in giving.digests],
            "remote_engine_id": self._engine_id,
            "remote_request_id": giving.lease.hex(),
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._num_ranks,
        }


def _lease(params: Mapping[str, Any]) -> bytes:
    given = params.get("remote_request_id")
    if not isinstance(given, str) or not re.fullmatch(f"[0-9a-f]{{{2 * _LEASE_BYTES}}}", given):
        raise ValueError(
            "remote_request_id of kv_transfer_params must be what the other engine calls the request, "
            f"{2 * _LEASE_BYTES} hexadecimal digits, given {shown(given)}"
        )
    return bytes.fromhex(given)
