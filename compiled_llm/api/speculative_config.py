"""SpeculativeConfig: how tokens are drafted, and how many of them a step may verify. Validated once, frozen.

A method is a line of ``METHODS``: the fields that it takes, with their defaults. A field that only other methods take
is refused. What makes a drafter of a method is the table of ``drafting/methods.py``.
"""

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from compiled_llm.api.argument_checks import integer, number, one_of
from compiled_llm.api.names import QUANTIZATIONS, SPECULATIVE_FIELDS, refuse_unknown_names
from compiled_llm.api.readable import shown

MOST_DRAFT_TOKENS = 63  # masks of trees have 64 bits
MOST_NETWORK_TOKENS = 15  # of a chain, whose drafts are one graph
SHARE_UNIT = 1 << 20  # a network gives shares of nodes in whole numbers of this part


class Method(NamedTuple):
    """What a method of drafting takes.

    Attributes:
        num_speculative_tokens: where the user gives none.
        most: that may be given, for a chain.
        fields: its own fields of ``SpeculativeConfig``, with what they are where the user gives nothing.
        needs: those of these that the user has to give.
    """

    num_speculative_tokens: int
    fields: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    most: int = MOST_DRAFT_TOKENS


_OF_NETWORKS = {"model": None, "revision": None, "quantization": None, "speculative_token_tree": None}


class NetworkTree(NamedTuple):
    """What a network gives of a tree of drafts, for the host to choose nodes from.

    Attributes:
        depth: levels; 0: as many as it has heads.
        width: nodes of a level that it goes on from.
        ranks: tokens after each.
    """

    depth: int
    width: int
    ranks: int


METHODS: Mapping[str, Method] = {
    "ngram": Method(7, {"prompt_lookup_min": None, "prompt_lookup_max": None, "speculative_token_tree": None}),
    "suffix": Method(
        15,
        {
            "suffix_decoding_max_tree_depth": 24,
            "suffix_decoding_max_cached_requests": 10_000,
            "suffix_decoding_max_spec_factor": 1.0,
            "suffix_decoding_min_token_prob": 0.1,
            "speculative_token_tree": None,
        },
    ),
    "lookahead": Method(7, {"lookahead_window": None, "lookahead_ngram": 4}),
    "draft_model": Method(4, _OF_NETWORKS, ("model",), MOST_NETWORK_TOKENS),
    "eagle3": Method(3, _OF_NETWORKS, ("model",), MOST_NETWORK_TOKENS),
    "medusa": Method(3, _OF_NETWORKS, ("model",), MOST_NETWORK_TOKENS),
    "mtp": Method(2, {"quantization": None}, most=MOST_NETWORK_TOKENS),
    "layer_skip": Method(4, {"num_draft_layers": None}, most=MOST_NETWORK_TOKENS),
}
# Methods whose drafts a network of the worker makes behind each step.
NETWORK_METHODS = ("draft_model", "eagle3", "medusa", "mtp", "layer_skip")
_MOST_TREE_TEXT = 2000  # characters
_TREE_TOKENS = 15  # of a network's tree, where no number is given
_LOOKUP = 2, 5  # tokens, where neither bound is given: a run of 5 alone is there too seldom
_INTEGERS = {
    "num_speculative_tokens": (1, MOST_DRAFT_TOKENS),
    "prompt_lookup_min": (1, 16),
    "prompt_lookup_max": (1, 16),
    "suffix_decoding_max_tree_depth": (2, 64),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
    "lookahead_window": (1, MOST_DRAFT_TOKENS),
    "lookahead_ngram": (2, 8),
    "num_draft_layers": (1, 1023),
}
_NUMBERS = {
    "suffix_decoding_max_spec_factor": (0.1, 64.0),
    "suffix_decoding_min_token_prob": (0.0, 1.0),
}


@refuse_unknown_names("field of speculative_config", SPECULATIVE_FIELDS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. Out of range: ``ValueError`` with the name, what is allowed and what was given.

    Drafts change the number of steps, and never a token. The names are vLLM's, but for ``adaptive``.

    Attributes:
        method: "ngram": what followed the last few tokens where the request had them before (prompt lookup).
            "suffix": what most often followed the longest run of last tokens, in the request and in recent outputs of
            others (SuffixDecoding, Oliaro et al., 2024, arXiv:2411.04975).
            "draft_model": what a smaller model of the same vocabulary samples, with the random numbers of the model.
            "eagle3": what an EAGLE-3 head samples so, which reads the model's hidden states (Li et al., 2025,
            arXiv:2503.01840). "medusa": what Medusa heads do (Cai et al., 2024, arXiv:2401.10774).
            "mtp": the same of the layer for the token after the next that the model's own checkpoint has.
            "lookahead": what followed the last token in the request or in what the model said in passing, else what the
            last step sampled behind wrong drafts (lookahead decoding, Fu et al., 2024, arXiv:2402.02057).
            "layer_skip": what the model's own first layers and its head sample (LayerSkip, Elhoushi et al., 2024,
            arXiv:2404.16710). Of use for models that were trained to end early.
        num_speculative_tokens: most tokens that are drafted for a request and step, 1 to 63; of a chain by a network 1
            to 15. None: 7 by "ngram", 15 by "suffix", 7 by "lookahead", 4 by "draft_model" and "layer_skip", 3 by
            "eagle3" and "medusa", 15 for a tree of a network, 2 by "mtp".
        adaptive: draft fewer, or none, where measured acceptance and times of steps say that more would not pay.
            False: as many as the method proposes.
        prompt_lookup_min, prompt_lookup_max: by "ngram": the fewest and the most last tokens that are looked for, the
            most first. Where one is given the other is equal; neither: 2, 5.
        suffix_decoding_max_tree_depth: by "suffix": a run that is looked for has fewer tokens. None: 24.
        suffix_decoding_max_cached_requests: by "suffix": outputs that are kept to draft for other requests, of the same
            ``cache_salt``; the oldest goes first. 0: a request sees its own tokens alone. None: 10,000.
        suffix_decoding_max_spec_factor: by "suffix": most drafts for each token of the run that was found. None: 1.
        suffix_decoding_min_token_prob: by "suffix": drafts end where one is less likely than this, as counted. None:
            0.1.
        model: by "draft_model": a directory, a .gguf file or a hub id, of a checkpoint in which each token has the id
            that it has in the model. It has a KV cache of its own in the model's blocks.
            By "eagle3" and "medusa": a directory or hub id of such heads for this model.
        revision: of these: branch, tag or commit of a hub id. None: the main branch.
        quantization: of these, and by "mtp": as the engine argument of this name; the head that a network shares with
            the model is copied so, unless it is quantised or several ranks share it. "none": weights stay as the
            checkpoint has them. None: on a CPU "int8_w8a8", but for float32 and for checkpoints that are quantised,
            since what drafts is rounded changes how many are right, and no token; elsewhere, and by "mtp" of a model
            that is quantised, as that or the checkpoint is.
        lookahead_window: by "lookahead": places of a proposal that are guessed by iterations, at most
            ``num_speculative_tokens``. None: as many.
        lookahead_ngram: by "lookahead": tokens of the n-grams, 2 to 8. None: 4.
        num_draft_layers: by "layer_skip": how many of the first layers draft. None: a quarter of them, at least one.
        speculative_token_tree: by "ngram", "suffix", "medusa", "eagle3", "draft_model": drafts are a tree, several of
            which may follow the same token. "auto": of ``num_speculative_tokens`` nodes, those that were measured to be
            right most often. Or, by the first three, the nodes as a list of tuples in a str, such as
            "[(0,), (1,), (0, 0)]": the likeliest and the second likeliest first token, and the likeliest one after the
            former. None: drafts are a chain.
    """

    method: str
    num_speculative_tokens: int | None = None
    adaptive: bool = True
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
    lookahead_window: int | None = None
    lookahead_ngram: int | None = None
    num_draft_layers: int | None = None
    speculative_token_tree: str | None = None

    def __post_init__(self) -> None:
        one_of("method", self.method, tuple(METHODS))
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive must be True or False, given {shown(self.adaptive)}")
        method = METHODS[self.method]
        self._refuse_fields_of_others(method)
        for name, bounds in _INTEGERS.items():
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), *bounds)
        for name, limits in _NUMBERS.items():
            if getattr(self, name) is not None:
                number(name, getattr(self, name), *limits)
        for name in ("model", "revision"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name} must be a non-empty str, given {shown(value)}")
        if self.quantization is not None:
            one_of("quantization", self.quantization, ("none", *QUANTIZATIONS))
        if self.speculative_token_tree is not None:
            self._check_tree()
        self._complete(method)
        if not self.has_trees and self.num_tokens > method.most:
            raise ValueError(
                f"num_speculative_tokens must be an integer from 1 to {method.most} with method {self.method!r}, whose "
                f"drafts are one graph, given {self.num_tokens}"
            )
        if self.lookahead_window is not None and self.lookahead_window > self.num_tokens:
            raise ValueError(
                f"lookahead_window must be at most num_speculative_tokens, {self.num_tokens}, given "
                f"{self.lookahead_window}"
            )
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is not None and most is not None and least > most:
            raise ValueError(f"prompt_lookup_min must be at most prompt_lookup_max, {most}, given {least}")

    @classmethod
    def of(cls, value: Any) -> Self:
        """``value``, or what a dict of its fields says.

        Raises:
            ValueError: it is neither, or a field is unknown or out of range.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ValueError(
                'speculative_config must be a SpeculativeConfig or a dict of its fields, such as {"method": "ngram"}, '
                f"given {shown(value)}"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if "method" not in value and names.issuperset(value):  # else the constructor names what is unknown
            raise ValueError(
                f"speculative_config must have a method, one of {', '.join(METHODS)}, given {shown(value)}"
            )
        return cls(**value)

    @property
    def num_tokens(self) -> int:
        """Most drafts for a request and step."""
        assert self.num_speculative_tokens is not None
        return self.num_speculative_tokens

    @property
    def reads_tokens(self) -> bool:
        """Whether a network reads tokens of requests: not what the step before left alone."""
        return self.method in ("draft_model", "eagle3", "mtp")

    @property
    def has_trees(self) -> bool:
        return self.speculative_token_tree is not None

    @property
    def tree_shape(self) -> frozenset[tuple[int, ...]] | None:
        """The nodes of ``speculative_token_tree``, each as its rank at each depth; None: there are none given."""
        return None if self.speculative_token_tree in (None, "auto") else _tree_shape(self.speculative_token_tree)

    @property
    def network_tree(self) -> NetworkTree | None:
        """What a network has to give for ``speculative_token_tree``; None: chains, or what the host gives."""
        if self.method not in NETWORK_METHODS or not self.has_trees:
            return None
        shape, number = self.tree_shape, self.num_tokens
        if shape is not None:
            return NetworkTree(max(map(len, shape)), 1, 1 + max(max(node) for node in shape))
        if self.method == "medusa":
            return NetworkTree(0, 1, min(8, 1 + number // 5))
        depth = min(number, 2 + number.bit_length() // 2)
        width = max(1, min(8, number // depth))
        return NetworkTree(depth, width, max(2, width))

    def _check_tree(self) -> None:
        shape = self.tree_shape
        if shape is not None and self.method in NETWORK_METHODS and self.method != "medusa":
            raise ValueError(
                f'speculative_token_tree must be "auto" or left out with method {self.method!r}, whose nodes are the '
                f"likeliest paths, given {shown(self.speculative_token_tree)}"
            )
        if shape is None:
            return
        if self.num_speculative_tokens not in (None, len(shape)):
            raise ValueError(
                f"num_speculative_tokens must be left out with speculative_token_tree, or be the number of its nodes, "
                f"{len(shape)}, given {self.num_speculative_tokens}"
            )
        object.__setattr__(self, "num_speculative_tokens", len(shape))

    def _refuse_fields_of_others(self, method: Method) -> None:
        for name in {name: None for other in METHODS.values() for name in other.fields}:
            if name not in method.fields and getattr(self, name) is not None:
                takes = [key for key, other in METHODS.items() if name in other.fields]
                raise ValueError(
                    f"{name} must be left out with method {self.method!r} (it belongs to "
                    f"{', '.join(map(repr, takes))}), given {shown(getattr(self, name))}"
                )
        for name in method.needs:
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be given with method {self.method!r}, given None")

    def _complete(self, method: Method) -> None:
        number = _TREE_TOKENS if self.has_trees and self.method in NETWORK_METHODS else method.num_speculative_tokens
        defaults = {"num_speculative_tokens": number, **method.fields}
        if self.method == "ngram":
            least, most = self.prompt_lookup_min, self.prompt_lookup_max
            bounds = _LOOKUP if least is None and most is None else (most, least)  # one alone is both
            defaults |= dict(zip(("prompt_lookup_min", "prompt_lookup_max"), bounds, strict=True))
        elif self.method == "lookahead":
            defaults["lookahead_window"] = self.num_speculative_tokens or method.num_speculative_tokens
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)


def _tree_shape(value: object) -> frozenset[tuple[int, ...]]:
    """The nodes of a ``speculative_token_tree`` that is no "auto"; ``ValueError`` for what is no tree."""
    try:
        nodes = ast.literal_eval(value) if isinstance(value, str) and len(value) <= _MOST_TREE_TEXT else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        nodes = None
    shape = frozenset(nodes) if isinstance(nodes, list) and all(map(_is_node, nodes)) else frozenset()
    parents_and_siblings = {
        before for node in shape for before in (node[:-1], (*node[:-1], node[-1] - 1)) if before and before[-1] >= 0
    }
    if not 1 <= len(shape) <= MOST_DRAFT_TOKENS or not shape.issuperset(parents_and_siblings):
        raise ValueError(
            f'speculative_token_tree must be "auto" or a str with a list of 1 to {MOST_DRAFT_TOKENS} tuples, a path of '
            "ranks from 0 each, with the parent of each and its siblings of lower rank, such as "
            f'"[(0,), (1,), (0, 0)]", given {shown(value)}'
        )
    return shape


def _is_node(node: object) -> bool:
    return isinstance(node, tuple) and node != () and all(type(rank) is int and rank >= 0 for rank in node)
