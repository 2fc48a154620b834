"""Loading a network that drafts: its weights, beside those of the model, and what its KV cache is made of."""

import dataclasses
import math
from typing import Any, NamedTuple

import torch

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.speculative_config import NetworkTree
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.draft_model import DraftCheckpoint
from compiled_llm.checkpoint.mtp import as_stored
from compiled_llm.checkpoint.quantization import bytes_of_layers, linears_of
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.family import HeadFamily, prefix_of
from compiled_llm.models.family import Description
from compiled_llm.models.inputs import FeatureCache, HiddenCache, KVCache
from compiled_llm.models.last_layer import LastLayer
from compiled_llm.models.linears.adapted import without_adapters
from compiled_llm.models.linears.copied import copied
from compiled_llm.models.linears.protocol import Linear, LinearKind, StoredLinear
from compiled_llm.models.linears.quantized import Quantized, Scheme
from compiled_llm.models.linears.quantizing import Quantizing
from compiled_llm.models.linears.vocabulary import VocabularyRows
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import tensors
from compiled_llm.ops.torch_private import mark_static_address
from compiled_llm.step.kv_cache import (
    allocate,
    allocate_features,
    bytes_per_token,
    describe,
    layer_dtypes,
    num_tensors,
)
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.cpu_kernels import ops_of
from compiled_llm.worker.device import use_device
from compiled_llm.worker.draft_trees import check_trees
from compiled_llm.worker.memory import check_room_for_weights, estimated_activations, num_bytes


class DraftPlan(NamedTuple):
    """What is known of a network before its weights are read.

    Attributes:
        model_config: with as many positions as the engine's requests may have.
        cache_dtypes: of each layer's KV cache.
    """

    checkpoint: DraftCheckpoint
    model_config: ModelConfig
    cache_dtypes: tuple[torch.dtype, ...]
    linears: LinearKind
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        checkpoint: DraftCheckpoint,
        target: ModelConfig,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "DraftPlan":
        """``ValueError`` for a cache, a quantisation or trees that the network cannot have. ``target``: the model."""
        checkpoint = checkpoint.rounded(device, dtype)
        config = checkpoint.config
        model_config = dataclasses.replace(checkpoint.model_config, max_position_embeddings=max_model_len)
        cache_dtypes = layer_dtypes(config, dtype, model_config)
        use_device(device, cache_dtypes, model_config)
        if checkpoint.tree is not None:
            check_trees(model_config, device, checkpoint.num_tokens, exact=config.exact)
        # Heads without a cache go through their weights once for a step, and the model through all of its own between.
        # Other networks do so for each draft: only the first finds nothing in the processor's caches.
        between = 0 if cache_dtypes else bytes_of_layers(target, dtype)
        linears = linears_of(config, model_config, device, dtype, between)
        if prefix_of(model_config):
            linears = as_stored(linears, checkpoint.directory)
        return cls(checkpoint, model_config, cache_dtypes, linears, device, dtype)

    @property
    def head(self) -> HeadFamily | None:
        """Its family, if it reads the model's hidden states."""
        family = family_of(self.model_config)
        return family if isinstance(family, HeadFamily) else None

    @property
    def keeps_hidden(self) -> bool:
        """Whether it keeps what features are made of, or what goes into a last layer that gives that (``last_layer``
        of a ``DraftNetwork``), and makes them when they are read.

        On a CPU: most tokens are never drafted after, and the model's steps need not compute anything for it. A GPU
        keeps features, which take a third of the memory.
        """
        return self.device.type == "cpu"

    @property
    def feature_size(self) -> int:
        """Elements that it keeps of a token's hidden states."""
        head = self.head
        if head is None or not head.feature_size(self.model_config):
            return 0
        return head.hidden_size(self.model_config) if self.keeps_hidden else head.feature_size(self.model_config)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in its KV cache."""
        return bytes_per_token(self.model_config, self.cache_dtypes) + self.feature_size * self.dtype.itemsize

    @property
    def num_cache_tensors(self) -> int:
        return num_tensors(self.model_config, self.cache_dtypes) + bool(self.feature_size)

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        """A zeroed KV cache, the last of which has the features, if it has any, or what they are made of."""
        cache = allocate(self.model_config, self.cache_dtypes, num_blocks, block_size, self.device)
        if not self.feature_size:
            return cache
        kind = HiddenCache if self.keeps_hidden else FeatureCache
        shape = num_blocks, block_size, self.feature_size
        return (*cache, allocate_features(kind, shape, self.dtype, self.device))

    def describe_cache(self) -> str:
        """As ``kv_cache.describe``."""
        of_layers = describe(self.model_config, self.cache_dtypes, self.dtype)
        features = self.feature_size * self.dtype.itemsize
        return f"{of_layers}, and {features} of the model's hidden states" if features else of_layers

    def activations(self, limits: EngineLimits) -> int:
        """Bytes that its largest step holds besides weights and cache, about."""
        return estimated_activations(self.model_config, limits, self.dtype, self.linears)

    def cpu_ops(self) -> list[str]:
        """The ops of ``kernel_build.OPS`` that its steps call."""
        of_head = self._scheme_of_head
        others = [] if of_head is None else [of_head.cpu_op]
        return sorted({*ops_of(self.model_config, self.dtype, self.linears), *others})

    @property
    def _scheme_of_head(self) -> Scheme | None:
        """How its own copy of the model's head is kept; None: it has none."""
        own = self.description().weights
        shares = self.head is not None and own.head is None and not getattr(own, "heads", ())  # those of Medusa
        if not shares or not isinstance(self.linears, Quantizing):
            return None
        return self.linears.scheme(StoredLinear("head", 0, 0, role="head"))

    @property
    def own_head_bytes(self) -> int:
        """Of a copy of the model's head, unless that is quantised or shared by ranks; 0: it makes none."""
        scheme, sizes = self._scheme_of_head, self.model_config
        return 0 if scheme is None else scheme.form.nbytes(sizes.vocab_size, sizes.hidden_size)

    def _copies(self, head: Linear | None, num_ranks: int) -> bool:
        """Whether it drafts with a copy of the model's ``head``."""
        is_kept = num_ranks > 1 or isinstance(head, Quantized | VocabularyRows)
        return self._scheme_of_head is not None and not is_kept

    def _with_own_head(self, weights: Any, num_ranks: int) -> Any:
        """``weights`` with a copy of the model's head in fewer bits: each draft reads all of it.

        That of several ranks has the rows of some tokens, and one that is quantised already has as few bits.
        """
        if not self._copies(weights.head, num_ranks):
            return weights
        return weights._replace(head=copied(weights.head, self.linears, "head", self.dtype, self.device))

    def description(self) -> Description[Any]:
        """What the weights are."""
        return family_of(self.model_config).describe(self.model_config, self.dtype, self.linears)

    def load(
        self, progress: StartProgress, target: Any, num_ranks: int = 1, last_layer: LastLayer | None = None
    ) -> "DraftNetwork":
        """Read the weights, or make them where the engine makes all.

        Args:
            target: the weights of the model.
            num_ranks: processes that load as much each.
            last_layer: of the model, if that may be computed when the network reads a prompt, and not in the step.

        Raises:
            ValueError: the checkpoint or the memory does not allow it.
        """
        c, config, directory = self.model_config, self.checkpoint.config, self.checkpoint.directory
        description = self.description()
        of_all = description.weights, self.linears, config, c, directory, self.device, self.dtype
        beside = self.own_head_bytes if self._copies(without_adapters(target).head, num_ranks) else 0
        check_room_for_weights(*of_all, num_ranks, beside=beside)
        sizes = {name: math.prod(shape) * self.dtype.itemsize for name, shape in description.taken.items()}
        with progress.stage("loading the draft model", sizes, is_long=False, in_bytes=True) as stage:
            if config.load_format == "dummy":
                weights = loader.dummy_weights(c, self.dtype, self.device, config.seed, self.linears, stage.advance)
            else:
                weights = loader.load_weights(directory, c, self.dtype, self.device, self.linears, stage.advance)
        size = num_bytes(weights)
        if self.head is not None:
            weights = self.head.share(weights, without_adapters(target))
            shared, weights = weights.head, self._with_own_head(weights, num_ranks)
            size += 0 if weights.head is shared else num_bytes(weights.head)
        for tensor in tensors(weights):
            mark_static_address(tensor)
        network = DraftNetwork(c, weights, self.cache_dtypes, self.checkpoint.num_tokens, size, self.checkpoint.tree)
        waits = self.keeps_hidden and network.has_cache and self.head is not None and not network.taps
        return network._replace(last_layer=last_layer) if waits else network


class DraftNetwork(NamedTuple):
    """A network as a start has loaded it.

    Attributes:
        cache_dtypes: of each layer's KV cache.
        num_tokens: most that it drafts for a request and step.
        nbytes: of the weights that are not the model's.
        tree: what it gives of a tree of drafts; None: they are a chain.
        last_layer: of the model, which it computes of the tokens that it reads; its cache has what goes into that.
    """

    model_config: ModelConfig
    weights: Any
    cache_dtypes: tuple[torch.dtype, ...]
    num_tokens: int
    nbytes: int
    tree: NetworkTree | None = None
    last_layer: LastLayer | None = None

    @property
    def has_cache(self) -> bool:
        """Whether it keeps anything of tokens."""
        return self.model_config.num_layers > 0

    @property
    def taps(self) -> tuple[int, ...]:
        """See ``HeadFamily``."""
        if self.last_layer is not None:
            return (self.last_layer.number,)
        family = family_of(self.model_config)
        return family.taps(self.model_config) if isinstance(family, HeadFamily) else ()

    def reads_every_row(self, num_layers: int) -> bool:
        """Whether it reads of each token what the last of the model's ``num_layers`` gave.

        Medusa heads read that of rows of logits alone, and a head that taps earlier layers none of it.
        """
        if not self.has_cache or not isinstance(family_of(self.model_config), HeadFamily):
            return False
        return not self.taps or max(self.taps) == num_layers
