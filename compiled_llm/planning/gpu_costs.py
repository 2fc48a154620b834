"""Step costs of GPUs that are not there, by arithmetic: launches, bytes, operations, and what goes between GPUs.

A step's layers take their launches, and the longer of their weights' bytes and their operations. Contexts and prompts'
attention come on top, in launches of their own. The constants are fitted to whole steps of one H200
(docs/results/gpu), with which ``tests/planning/test_gpu_costs.py`` compares them; ``gpu_step/estimate.py`` goes by each
launch's code instead. More than one GPU was not measured: sums over GPUs take what others published for H100s with
NVLink (vLLM's pull requests 24111 and 42324), hops what ``LINKS`` assumes.

Left out: the host, clocks that fall, unequal experts, padding to a bucket's size.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from compiled_llm.gpu_step.gpus import Gpu
from compiled_llm.planning.costs import Points, ReplicaCosts

_LAUNCH_SECONDS = 2.6e-6  # of a launch and the gap behind it, without its bytes and operations
_BANDWIDTH_SHARE, _KEYS_BANDWIDTH_SHARE, _MATRIX_SHARE = 0.9, 0.7, 0.68
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # the engine's buckets
_TOKENS = (16, 64, 128, 256, 512, 768, 1024, 1536, 2048)
# All-reduce of 8 GPUs on NVLink: (bytes, seconds); the smallest as seen on B300.
_NVLINK = (
    (16 << 10, 7e-6),
    (512 << 10, 12e-6),
    (1 << 20, 16e-6),
    (4 << 20, 33e-6),
    (8 << 20, 46e-6),
    (64 << 20, 316e-6),
)
# Without NVLink: the start, and bytes a second of each GPU. Assumed, of PCIe 5 with 16 lanes and 400 Gb/s Ethernet.
LINKS: Mapping[str, tuple[float, float]] = {"pcie": (20e-6, 40e9), "network": (15e-6, 45e9)}


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model in bfloat16, by arithmetic (``model_facts.py``); bytes and operations as in ``ModelWork``.

    Attributes:
        kv_bytes: of a token, on each of so many ranks; a number of ranks that it lacks cannot be.
        read_bytes: of what each step reads, the head and not the experts.
        num_experts: of a layer; 0: there are none. ``expert_bytes``: of one, in all layers.
    """

    name: str
    num_layers: int
    hidden_size: int
    weight_bytes: float
    read_bytes: float
    flops_per_token: float
    head_flops: float
    pair_flops: float
    kv_bytes: Mapping[int, float]
    num_experts: int = 0
    top_k: int = 0
    expert_bytes: float = 0.0

    def bytes_of_step(self, tokens: int) -> float:
        """That a step of so many tokens reads of the weights; each token chooses its experts at random."""
        unused = (1 - self.top_k / self.num_experts) ** tokens if self.num_experts else 1.0
        return self.read_bytes + self.expert_bytes * self.num_experts * (1 - unused)


@dataclasses.dataclass(frozen=True)
class GpuCosts:
    """The ``Catalogue`` of models on GPUs of one kind.

    Attributes:
        link: between the GPUs of a machine, "nvlink" or one of ``LINKS``; stages may lie on several machines.
        per_machine: GPUs of a machine: the most that a layer is shared by.
    """

    facts: Sequence[ModelFacts]
    gpu: Gpu
    per_machine: int = 8
    link: str = "nvlink"

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.facts)

    def costs(self, model: str, tp: int, pp: int) -> ReplicaCosts | None:
        facts = next(one for one in self.facts if one.name == model)
        if tp not in facts.kv_bytes or tp > self.per_machine or pp > facts.num_layers:
            return None
        rate, stage_layers = self.gpu.bf16 * _MATRIX_SHARE, -(-facts.num_layers // pp)
        # The last stage has the head besides; whole layers cannot do better than the larger of the two.
        slowest = max(stage_layers / facts.num_layers, 1 / pp)

        def points(sizes: Sequence[int], is_prompt: bool) -> Points:
            return tuple((size, self._seconds(facts, tp, size, is_prompt)) for size in sizes)

        return ReplicaCosts(
            tp=tp,
            pp=pp,
            decode=points(_ROWS, False),
            chunk=points(_TOKENS, True),
            key_seconds=facts.kv_bytes[tp] / (self.gpu.bandwidth * _KEYS_BANDWIDTH_SHARE),
            pair_seconds=facts.pair_flops / tp / rate,
            weight_bytes=facts.weight_bytes / (tp * pp),
            kv_bytes=facts.kv_bytes[tp] / pp,
            max_num_seqs=_ROWS[-1],
            max_tokens=_TOKENS[-1],
            max_tokens_beside_decodes=_TOKENS[-1],
            hop_seconds=self._hop_seconds(facts, tp * pp) if pp > 1 else 0.0,
            slowest_stage=slowest,
        )

    def _seconds(self, facts: ModelFacts, tp: int, tokens: int, is_prompt: bool) -> float:
        launches = (14 if facts.num_experts else 11) if is_prompt else 7 if tokens <= 32 or facts.num_experts else 8
        rows = 1 if is_prompt else tokens
        flops = facts.flops_per_token * tokens + facts.head_flops * rows
        memory = facts.bytes_of_step(tokens) / (self.gpu.bandwidth * _BANDWIDTH_SHARE)
        seconds = facts.num_layers * launches * _LAUNCH_SECONDS
        seconds += max(memory, flops / (self.gpu.bf16 * _MATRIX_SHARE)) / tp
        if tp > 1:
            seconds += 2 * facts.num_layers * self.all_reduce_seconds(2 * tokens * facts.hidden_size, tp)
        return seconds

    def _hop_seconds(self, facts: ModelFacts, devices: int) -> float:
        """Of 64 tokens between two stages: by the network where a replica has more GPUs than a machine."""
        if devices <= self.per_machine and self.link == "nvlink":
            start, speed = 7e-6, 200e9
        else:
            start, speed = LINKS["network" if devices > self.per_machine else self.link]
        return start + 64 * 2 * facts.hidden_size / speed

    def all_reduce_seconds(self, size: int, ranks: int) -> float:
        """Of ``size`` bytes on each of ``ranks`` GPUs of a machine."""
        if self.link != "nvlink":
            start, speed = LINKS[self.link]
            return start + 2 * size * (ranks - 1) / ranks / speed
        if size <= _NVLINK[0][0]:
            return _NVLINK[0][1]
        for (low, before), (high, after) in itertools.pairwise(_NVLINK):
            if size <= high:
                part = math.log(size / low) / math.log(high / low)
                return before * (after / before) ** part
        return _NVLINK[-1][1] * size / _NVLINK[-1][0]
