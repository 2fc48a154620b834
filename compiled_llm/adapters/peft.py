"""An adapter as PEFT publishes it: its tensors, checked against the base model, as the layers' slots take them."""

import hashlib
import math
import os
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.adapters.peft_config import CONFIG_FILE, MERGE, PeftConfig
from compiled_llm.api.lora_request import WHOLE
from compiled_llm.checkpoint.stored_tensors import StoredTensor, listed, stored_tensors
from compiled_llm.models.linears.adapted import AnyPlace, Change, Place, of_any_expert
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.linears.quantized import Quantized
from compiled_llm.models.linears.whole import WholePlace
from compiled_llm.ops.linear.lora import tiles_of

TENSORS_FILE = "adapter_model.safetensors"
DTYPES = ("F32", "F16", "BF16")
_PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
_ROWS_A, _ROWS_B = ".lora_embedding_A", ".lora_embedding_B"
_TOKENS, _COPY = ".token_adapter.trainable_tokens_delta", ".base_layer.weight"
MATRIX = ".weight"  # of a whole module
# What modules are within, in transformers' model, and checkpoints leave out or call otherwise.
_WITHIN = ("model", "language_model", "text_model", "transformer", "gpt_neox", "backbone")
_OTHER_TENSORS = {".lora_magnitude_vector": "a DoRA's", ".lora_B.bias": "a bias", ".bias": "a whole module's bias"}
_SWAPPED_UNTIL = 0, 19  # PEFT's release from which on A of all experts has their inputs where they lie transposed, too
_ROWS_AT_ONCE = 4096  # of a table that are compared

NO_PLACES: Mapping[str, WholePlace] = types.MappingProxyType({})


class FileStamp(NamedTuple):
    """What changes when a file does.

    Attributes:
        modified_ns: when its content was last written; copies and archives may bring an older file's time along.
        changed_ns: when anything of it was last changed; nobody can set that.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


Stamp = tuple[FileStamp, ...]  # of an adapter's files


class Adapter:
    """An adapter in host memory. Nothing changes it.

    Attributes:
        digest: of all that decides what it computes: equal digests are equal adapters.
        changes: by the names of the base model's layers.
        matrices: in the place of the base model's, as their slots take them, by the names of heads and embeddings.
    """

    def __init__(self, name: str, digest: str, changes: Mapping[str, Change], matrices: Mapping[str, Tensor]) -> None:
        self.name, self.digest, self.changes, self.matrices = name, digest, changes, matrices

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors as bytes: pickle takes a millisecond for each of torch's."""
        changes = {
            name: [
                (tensor.contiguous().flatten().view(torch.uint8).numpy(), tensor.dtype, tensor.shape)
                for tensor in change
            ]
            for name, change in self.changes.items()
        }
        assert not self.matrices, "ranks have no slots for whole matrices"
        return _from_bytes, (self.name, self.digest, changes)

    def __repr__(self) -> str:
        return f"<Adapter {self.name!r}: {len(self.changes)} layers, {self.digest[:12]}>"


def _from_bytes(name: str, digest: str, changes: Mapping[str, list[tuple[Any, torch.dtype, torch.Size]]]) -> Adapter:
    """What ``Adapter.__reduce__`` gives."""
    made = {
        layer: Change(*(torch.from_numpy(array).view(dtype).view(shape) for array, dtype, shape in tensors))
        for layer, tensors in changes.items()
    }
    return Adapter(name, digest, made, {})


def stamp(directory: Path) -> Stamp:
    """What changes when the files of an adapter do. ``ValueError`` where one is missing."""
    stamps = []
    for name in (CONFIG_FILE, TENSORS_FILE):
        try:
            status = os.stat(directory / name)
        except (OSError, ValueError) as error:
            raise ValueError(_missing(directory, name, error)) from error
        times = status.st_mtime_ns, status.st_ctime_ns
        stamps.append(FileStamp(status.st_dev, status.st_ino, status.st_size, *times))
    return tuple(stamps)


def _missing(directory: Path, name: str, error: Exception) -> str:
    if name == TENSORS_FILE and (directory / "adapter_model.bin").exists():
        return (
            f"{directory}: adapter_model.bin can hold code and is not read: save the adapter as safetensors (PEFT's "
            "save_pretrained does)"
        )
    return f"{directory}: lora_path must be a directory with {CONFIG_FILE} and {TENSORS_FILE}: {error}"


def read_adapter(
    name: str,
    directory: Path,
    places: Mapping[str, AnyPlace],
    most_rank: int,
    whole: Mapping[str, WholePlace] = NO_PLACES,
) -> Adapter:
    """The adapter in ``directory``.

    Args:
        places: of the base model's layers that adapters may change, by their names in its checkpoint.
        most_rank: the engine's ``max_lora_rank``.
        whole: heads and embeddings that adapters may bring whole, by their names.

    Raises:
        ValueError: a file is missing, damaged or has what is not served, or does not fit the base model.
    """
    config, path = PeftConfig.read(directory), directory / TENSORS_FILE
    reading = _Reading(config, path, places, most_rank, by_module(path, stored_tensors(path)), whole)
    return Adapter(name, *reading.all())


def by_module(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """By module and end of the name. Every tensor is in it, with all that belong to it; else a ``ValueError``."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        end = next((end for end in (A, B, _ROWS_A, _ROWS_B, _TOKENS, _COPY, MATRIX) if name.endswith(end)), None)
        if end is None or not name.startswith(_PREFIX) or (end == MATRIX and ".lora_" in name):
            what = next((f", {what}" for end, what in _OTHER_TENSORS.items() if name.endswith(end)), "")
            raise ValueError(
                f"{path}: must have tensors {_PREFIX}MODULE{A} and {B}, or those of embeddings, found "
                f"{name!r:.200}{what}: {MERGE}"
            )
        found.setdefault(name.removeprefix(_PREFIX).removesuffix(end), {})[end] = tensor
    alone = [
        f"{module}{end}"
        for module, tensors in found.items()
        for end in (A, B, _ROWS_A, _ROWS_B)
        if end not in tensors and tensors.keys() & {*((A, B) if end in (A, B) else (_ROWS_A, _ROWS_B))}
    ]
    alone += [f"{module}{A}" for module, tensors in found.items() if tensors.keys() == {_COPY}]
    if alone:
        raise ValueError(f"{path}: lacks tensors whose counterparts it has: {listed(alone)}: save or download it again")
    if not found:
        raise ValueError(f"{path}: holds no tensor, so the adapter changes nothing: save or download it again")
    return found


def _stripped(name: str) -> str:
    words = name.split(".")
    while words[0] in _WITHIN and len(words) > 1:
        words = words[1:]
    return ".".join(words)


class _Reading:
    """The tensors of one adapter, on their way to the base model's layers.

    Args:
        modules: as ``by_module``.
    """

    def __init__(
        self,
        config: PeftConfig,
        path: Path,
        places: Mapping[str, AnyPlace],
        most_rank: int,
        modules: Mapping[str, Mapping[str, StoredTensor]],
        whole: Mapping[str, WholePlace],
    ) -> None:
        self._config, self._path, self._most_rank, self._modules = config, path, most_rank, modules
        self._load_base = f"load the adapter's own base model{config.base}"
        self._places = {_stripped(name): place for name, place in places.items()}
        # What transformers' modules are called, where checkpoints have another name.
        self._names = {
            _stripped(place.part.also): name
            for name, place in self._places.items()
            if place.part.also and place.of_rows is None
        }
        # Of all experts, as transformers' parameters have them: by module, by parameter.
        self._stacks: dict[str, dict[str, list[Place]]] = {}
        for place in places.values():
            if isinstance(place, Place) and place.num_experts and place.part.stacked:
                module, _, parameter = _stripped(place.part.stacked).rpartition(".")
                self._stacks.setdefault(module, {}).setdefault(parameter, []).append(place)
        self._whole = {_stripped(n): place for key, place in whole.items() for n in (key, place.part.also) if n}
        self._matrices: dict[str, Tensor] = {}
        self._digest = hashlib.sha256()
        self._changes: dict[str, Change] = {}
        self._of_experts: dict[str, dict[int, Change]] = {}  # by place: of single experts

    def all(self) -> tuple[str, dict[str, Change], dict[str, Tensor]]:
        """The digest, the changes and the whole matrices."""
        self._check_known()
        self._check_complete()
        for module, tensors in sorted(self._modules.items()):
            if MATRIX in tensors:
                self._take_matrix(module, tensors[MATRIX])
            elif _TOKENS in tensors:
                self._take_tokens(module, tensors[_TOKENS])
            elif _ROWS_A in tensors:
                self._take_rows(module, tensors[_ROWS_A], tensors[_ROWS_B])
            elif self._stack_of(module) is not None:
                self._take_stack(module, tensors[A], tensors[B])
            else:
                self._take_linear(module, tensors[A], tensors[B])
            if _COPY in tensors:
                self._check_copy(self._places[self._name(module)], tensors[_COPY])
        for name, by_expert in self._of_experts.items():
            self._put(name, _of_all_experts(by_expert, self._places[name].num_experts))
        digest = self._digest.hexdigest() + WHOLE * bool(self._matrices)
        return digest, {self._places[name].part.name: c for name, c in self._changes.items()}, self._matrices

    # -- Modules

    def _name(self, module: str) -> str:
        """Of its place, if it has one."""
        name = _stripped(module)
        return self._names.get(name, name)

    def _stack_of(self, module: str) -> dict[str, list[Place]] | None:
        # PEFT wraps a module again for each further parameter of it.
        return self._stacks.get(re.sub(r"(\.base_layer)+$", "", _stripped(module)))

    def _is_known(self, module: str, tensors: Mapping[str, StoredTensor]) -> bool:
        name, has = self._name(module), tensors.keys()
        place = self._places.get(name)
        if MATRIX in has:
            return len(has) == 1 and _stripped(module) in self._whole
        if has & {_TOKENS, _COPY} and (place is None or place.part.role == "layer"):
            return False
        if _TOKENS in has:
            return len(has) == 1
        if place is not None:
            return (place.of_rows is None) == (A in has)
        return of_any_expert(name) in self._places or self._stack_of(module) is not None

    def _check_known(self) -> None:
        others = [module for module, has in self._modules.items() if MATRIX in has and not self._is_known(module, has)]
        others += [  # PEFT adds whole names to the ends that a user gave
            name for name in self._config.saved if not any(f".{m}".endswith(f".{_stripped(name)}") for m in self._whole)
        ]
        if others:
            raise ValueError(
                f"{self._path}: modules_to_save must have {' and '.join(sorted(self._whole)) or 'none'}, the model's "
                f"head and embedding, found a whole module's {listed(others)}: {MERGE}"
            )
        unknown = [module for module, tensors in self._modules.items() if not self._is_known(module, tensors)]
        if unknown:
            ends = sorted({name.rpartition(".")[2] for name in self._places})
            raise ValueError(
                f"{self._path}: changes modules that this engine lets no adapter change: {listed(unknown)}. It lets "
                f"them change {', '.join(ends)}. Name others with lora_target_modules (experts, routers, lm_head and "
                f"embed_tokens are not among 'all-linear'), {self._load_base}, or {MERGE}"
            )

    def _check_complete(self) -> None:
        """Raise where the config names layers for which there are no tensors."""
        has = {of_any_expert(self._name(module)) for module in self._modules} | {*map(self._name, self._modules)}
        module = min(self._modules, key=lambda module: self._name(module) not in self._places)
        within = module.removesuffix(_stripped(module))  # in transformers' model
        lacking = [
            place.part.name
            for name, place in self._places.items()
            if name not in has and not place.num_experts and self._config.names(within + name)
        ]
        names = [*self._modules]
        if any(name in has for name, place in self._places.items() if place.num_experts):
            each = (
                name.replace("*", str(expert))
                for name, place in self._places.items()
                for expert in range(place.num_experts)
            )
            stripped = {*map(self._name, names)}
            lacking += [name for name in each if name not in stripped and self._config.names(within + name)]
        lacking += [
            f"{within}{module}.{parameter}"
            for module, parameters in self._stacks.items()
            for parameter in parameters
            if self._config.names_parameter(f"{within}{module}.{parameter}")
            and not any(self._stack_of(name) is parameters for name in names)
        ]
        # A list is of the embedding, whatever that is called; a head that is the embedding has no tensor of its own.
        of_tokens = [self._name(name) for name, tensors in self._modules.items() if _TOKENS in tensors]
        of_tokens += [self._tied_to(self._places[name]) for name in of_tokens]
        if not self._config.ties:
            lacking += [n for n in self._config.saved if not any(f".{m}".endswith(f".{n}") for m in self._modules)]
        lacking += [
            name or "the embedding"
            for name in self._config.tokens
            if not any(not name or f".{module}".endswith(f".{name}") for module in of_tokens)
        ]
        if lacking:
            raise ValueError(
                f"{self._config.path}: modules_to_save, target_modules, target_parameters or trainable_token_indices "
                f"names modules without tensors in {TENSORS_FILE}: {listed(lacking)}: save or download it again"
            )

    # -- Kinds of changes

    def _take_linear(self, module: str, a: StoredTensor, b: StoredTensor) -> None:
        name, expert = self._name(module), None
        if name not in self._places:
            expert = int(re.findall(r"\.(\d+)(?=\.)", name)[-1])
            name = of_any_expert(name)
        place, rank = self._places[name], self._config.rank_of(module)
        part, count = place.part, place.num_experts
        if expert is not None and expert >= count:
            raise ValueError(f"{self._path}: {module} must be one of {count} experts: {self._load_base}")
        self._check(module, rank, (a, (rank, part.in_features)), (b, (part.out_features, rank)))
        made = self._read(self._name(module), module, place, a, b)
        change = Change(_in_order(made[0], part), tiles_of(_out_order(made[1], part)), self._scale(module))
        if expert is None:
            self._put(name, change)
        else:
            self._of_experts.setdefault(name, {})[expert] = change

    def _take_stack(self, module: str, a: StoredTensor, b: StoredTensor) -> None:
        """Of all experts: ``A [E * r, inputs]`` has one after another; columns of ``B [outputs, r * E]`` take turns."""
        stack = self._stack_of(module)
        assert stack is not None
        sizes = {p: (q[0].part.in_features, sum(place.part.out_features for place in q)) for p, q in stack.items()}
        fitting = [
            p for p, (inputs, outputs) in sizes.items() if a.shape[1:] == (inputs,) and b.shape[:1] == (outputs,)
        ]
        if not fitting:
            told = ", ".join(f"{p}: [E r, {inputs}] and [{outputs}, r E]" for p, (inputs, outputs) in sizes.items())
            raise ValueError(
                f"{self._path}: {a.name} and its B must be of a parameter of this model ({told}), found "
                f"{list(a.shape)} and {list(b.shape)}: {self._load_base}, or save the adapter again "
                "with a newer PEFT, if it has the two the other way round"
            )
        parameter = fitting[0]
        places, (inputs, outputs) = stack[parameter], sizes[parameter]
        if inputs == outputs and not places[0].part.transposed and self._config.is_older_than(*_SWAPPED_UNTIL):
            raise ValueError(
                f"{self._path}: {a.name} and its B have one size, and PEFT before {_SWAPPED_UNTIL[0]}."
                f"{_SWAPPED_UNTIL[1]} kept them the other way round: save the adapter again with a newer one"
            )
        owner = f"{re.sub(r'(.base_layer)+$', '', module)}.{parameter}"
        count, rank = places[0].num_experts, self._config.rank_of(owner)
        self._check(owner, rank, (a, (count * rank, inputs)), (b, (outputs, rank * count)))
        all_a, all_b = self._read(self._name(owner), owner, places[0], a, b)
        first, scale = 0, self._scale(owner).expand(count)
        for place in places:
            part = place.part
            of_part = _out_order(all_b[first : first + part.out_features], part)
            first += part.out_features
            by_expert = of_part.unflatten(1, (rank, count)).permute(2, 0, 1)
            tiles = torch.stack([tiles_of(one) for one in by_expert])
            self._put(_stripped(part.name), Change(_in_order(all_a, part).unflatten(0, (count, rank)), tiles, scale))

    def _take_rows(self, module: str, a: StoredTensor, b: StoredTensor) -> None:
        """Of an embedding ``[V, D]``, to which ``(B A)^T`` is added."""
        name, rank = self._name(module), self._config.rank_of(module)
        place = self._places[name]
        self._check(module, rank, (a, (rank, place.part.out_features)), (b, (place.part.in_features, rank)))
        made = self._read(name, module, place, a, b)
        self._put(name, Change(made[0].t().contiguous(), tiles_of(made[1]), self._scale(module)))
        head = self._tied_to(place)
        if self._config.ties and head and not any(self._name(other) == head for other in self._modules):
            self._put(head, Change(made[1].t().contiguous(), tiles_of(made[0].t()), self._scale(module)))

    def _take_tokens(self, module: str, stored: StoredTensor) -> None:
        """Rows in the place of an embedding's or a head's: a change whose rank is their number."""
        name, ids = self._name(module), self._config.tokens_of(module)
        place = self._places[name]
        assert isinstance(place, Place)
        vocab_size, size = place.part.out_features, place.part.in_features
        if ids and max(ids) >= vocab_size:
            raise ValueError(
                f"{self._config.path}: trainable_token_indices must be below {vocab_size}, the base model's "
                f"vocabulary, given {max(ids)}: {self._load_base}"
            )
        self._check(module, len(ids), (stored, (len(ids), size)))
        (rows,) = self._read(f"{name} {ids}", None, place, stored)
        head = self._tied_to(place)
        if head and not any(self._name(other) == head for other in self._modules):
            if head not in self._places:
                raise ValueError(
                    f"{self._path}: {stored.name} changes the head too, which is the embedding: name both with "
                    f"lora_target_modules, {head} and {name.rpartition('.')[2]}"
                )
            self._put_rows(head, place, ids, rows)
        self._put_rows(name, place, ids, rows)

    def _put_rows(self, name: str, of_model: Place, ids: Sequence[int], rows: Tensor) -> None:
        """``rows`` in the place of those of tokens ``ids``; ``of_model``: where these are read."""
        place = self._places[name]
        difference = (rows.float() - of_model.rows_of_model(torch.tensor(ids)).float()).to(rows.dtype)
        which = torch.zeros(of_model.part.out_features, len(ids), dtype=rows.dtype)
        which[list(ids), range(len(ids))] = 1
        scale = torch.ones(())
        if place.of_rows is None:
            self._put(name, Change(difference, tiles_of(which), scale))
        else:
            self._put(name, Change(which, tiles_of(difference.t()), scale))

    def _take_matrix(self, module: str, stored: StoredTensor) -> None:
        """A whole head or embedding: rows of it, as ``_take_tokens``, where so few are not the model's."""
        place = self._whole[_stripped(module)]
        if stored.dtype not in DTYPES or stored.shape != place.shape:
            raise ValueError(
                f"{self._path}: {stored.name} must be {list(place.shape)}, the base model's, in {', '.join(DTYPES)}, "
                f"found {list(stored.shape)} of {stored.dtype:.20}: {self._load_base}. A vocabulary of another size "
                f"needs a base model of that size: resize it, save it, and serve that, or {MERGE}"
            )
        matrix = _read(self._path, stored, place.dtype)
        names = [place.part.name]
        if self._config.ties:  # PEFT saves one or both of a tied pair
            saved = {self._whole[_stripped(m)].part.name for m, has in self._modules.items() if MATRIX in has}
            tied = {other.part.name for other in self._whole.values() if other.linear is place.linear}
            names += sorted(tied - saved)
        for name in names:
            self._put_matrix(name, matrix)

    def _put_matrix(self, name: str, matrix: Tensor) -> None:
        stripped, place = _stripped(name), self._whole[_stripped(name)]
        if stripped in self._changes or name in self._matrices:
            raise ValueError(f"{self._path}: has {name} twice, whole and changed: {MERGE}")
        self._digest.update(f"{name} whole {place.dtype}\n".encode())
        self._digest.update(matrix.view(torch.uint8).numpy().data)
        tokens, changed = place.differing(matrix), self._places.get(stripped)
        if tokens is not None and not len(tokens):
            return
        if tokens is not None and len(tokens) <= self._most_rank and isinstance(changed, Place):
            self._put_rows(stripped, changed, tokens.tolist(), matrix[tokens])
            return
        if place.matrices is None:
            sizes = {p.part.name: math.prod(p.shape) * p.dtype.itemsize for p in self._whole.values()}
            differing = "" if tokens is None else f", of which {len(tokens)} rows are not the base model's"
            raise ValueError(
                f"{self._path}: has a whole {name}{differing}: max_lora_modules_to_save must be at least 1 for that, "
                f"given 0. Each takes {sum(sizes.values())} bytes, of a head and an embedding. Give it, or {MERGE}. At "
                f"most max_lora_rank rows, {self._most_rank}, need none where lora_target_modules has {stripped}"
            )
        self._matrices[name] = place.matrices.prepared(matrix)

    def _tied_to(self, place: AnyPlace) -> str:
        """The head that the embedding of ``place`` is as well; "": none."""
        return _stripped(place.part.also) if place.of_rows is not None else ""

    # -- Tensors

    def _put(self, name: str, change: Change) -> None:
        if name in self._changes:
            raise ValueError(f"{self._path}: has {name} twice, once with its embedding or under another name: {MERGE}")
        self._changes[name] = change
        self._digest.update(f"{name}\n".encode())  # the same tensors may be those of an embedding and its head

    def _scale(self, module: str) -> Tensor:
        return torch.tensor(self._config.scale_of(module), dtype=torch.float32)

    def _check(self, module: str, rank: int, *expected: tuple[StoredTensor, tuple[int, ...]]) -> None:
        """Raise unless tensors have the shapes of the layer and of the rank that the config says."""
        for tensor, shape in expected:
            if tensor.dtype not in DTYPES:
                raise ValueError(
                    f"{self._path}: {tensor.name} must be in {', '.join(DTYPES)}, found {tensor.dtype:.20}"
                )
            if tensor.shape != shape:
                raise ValueError(
                    f"{self._path}: {tensor.name} must be {list(shape)}, by the base model and the rank {rank} of "
                    f"{CONFIG_FILE}, found {list(tensor.shape)}: {self._load_base}, or save the adapter again"
                )
        if rank > self._most_rank:
            raise ValueError(
                f"{self._path}: the rank of {module} must be at most the engine's max_lora_rank, {self._most_rank}, "
                f"found {rank}: give max_lora_rank={rank}"
            )

    def _read(self, name: str, module: str | None, place: AnyPlace, *stored: StoredTensor) -> list[Tensor]:
        """In the layer's dtype; the digest is of these, too. ``module``: None: one without a scale."""
        dtype = place.changes.a.dtype
        tensors = [_read(self._path, one, dtype) for one in stored]
        scale = "" if module is None else repr(self._config.scale_of(module))
        for part in (name, scale, str(tuple(tensors[0].shape)), str(dtype)):
            self._digest.update(f"{part}\n".encode())
        for tensor in tensors:
            self._digest.update(tensor.view(torch.uint8).numpy().data)
        return tensors

    def _check_copy(self, place: AnyPlace, stored: StoredTensor) -> None:
        """Raise where a copy of the base model's table is not what it is here. Quantised ones are not compared."""
        vocab_size, size = place.part.out_features, place.part.in_features
        assert isinstance(place, Place)
        same = stored.shape == (vocab_size, size) and stored.dtype in DTYPES
        if same and not isinstance(place.linear, Quantized):
            copy, dtype = stored.read(), place.changes.a.dtype
            for start in range(0, vocab_size, _ROWS_AT_ONCE):
                ids = torch.arange(start, min(start + _ROWS_AT_ONCE, vocab_size))
                same = same and torch.equal(place.rows_of_model(ids), copy[start : start + len(ids)].to(dtype))
        if not same:
            raise ValueError(
                f"{self._path}: {stored.name} must be the base model's, {[vocab_size, size]}, found another one, "
                f"{list(stored.shape)}: load the model that the adapter was trained on, or {MERGE}"
            )


def _read(path: Path, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    tensor = stored.read().to(dtype)
    if not tensor.isfinite().all():
        raise ValueError(
            f"{path}: {stored.name} must have finite numbers in {str(dtype)[6:]}: it is damaged, or dtype too narrow"
        )
    return tensor


def _in_order(a: Tensor, part: StoredLinear) -> Tensor:
    """``A [rank, inputs]`` in the order that the model takes the layer's inputs in."""
    return a if part.arrange_inputs is None or part.is_of_file else part.arrange_inputs(a.t()).t().contiguous()


def _out_order(b: Tensor, part: StoredLinear) -> Tensor:
    """The same of ``B [outputs, rank]``."""
    return b if part.arrange is None or part.is_of_file else part.arrange(b)


def _of_all_experts(changes: Mapping[int, Change], num_experts: int) -> Change:
    """Changes of single experts in one, with zeros where an expert has a lower rank than another one, or none."""
    like, rank = next(iter(changes.values())), max(change.rank for change in changes.values())
    a = torch.zeros(num_experts, rank, like.a.shape[1], dtype=like.a.dtype)
    b = torch.zeros(num_experts, len(like.b), rank, like.b.shape[2], dtype=like.b.dtype)
    scales = torch.zeros(num_experts)
    for expert, change in changes.items():
        a[expert, : change.rank], b[expert, :, : change.rank], scales[expert] = change.a, change.b, change.scale
    return Change(a, b, scales)
