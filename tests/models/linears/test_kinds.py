"""Kinds of linear layer: each computes what the checkpoint's weights say, and one more needs no change elsewhere."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears import kinds
from compiled_llm.models.linears.compressed import Compressed
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.kept_twice import KeptTwice
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import Linear, LinearKind, Put, StoredLinear, Take
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import tensors as tensors_of
from compiled_llm.ops import native
from compiled_llm.report.roofline import ModelWork
from tests.families import checkpoint


class TensorTake(NamedTuple):
    """Gives rows of ``tensors`` in pieces of odd sizes, the last ones first."""

    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self.tensors[name].shape == shape
        return self.tensors[name]

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        whole = torch.cat([self(name, shape) for name, shape in shapes.items()])
        for start in reversed(range(0, 0 if whole.is_meta else len(whole), 7)):
            put(start, whole[start : start + 7])


@pytest.mark.parametrize("in_features", [32, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [Dense, Exact, Packed])
def test_parts_over_the_same_input_are_one_layer(
    kind: LinearKind, dtype: torch.dtype, bias: bool, in_features: int
) -> None:
    torch.manual_seed(0)
    parts = [StoredLinear(name, size, in_features, bias) for name, size in (("q", 17), ("k", 16), ("v", 5))]
    tensors = {f"{part.name}.weight": torch.randn(part.out_features, in_features).to(dtype) for part in parts}
    tensors |= {f"{part.name}.bias": torch.randn(part.out_features).to(dtype) for part in parts if bias}

    w, x = kind.take(TensorTake(tensors), parts), torch.randn(3, in_features).to(dtype)
    assert isinstance(w, Linear)
    assert (w.out_features, w.in_features, w.nbytes) == (38, in_features, sum(t.nbytes for t in tensors.values()))
    for part, got in zip(parts, w.apply(x).split([17, 16, 5], dim=1), strict=True):
        expected = F.linear(x, tensors[f"{part.name}.weight"], tensors.get(f"{part.name}.bias"))
        torch.testing.assert_close(got, expected, atol=torch.finfo(dtype).eps * 16, rtol=torch.finfo(dtype).eps * 4)
    ids = torch.tensor([0, 16, 37, 16], dtype=torch.int32)
    weight = torch.cat([tensors[f"{part.name}.weight"] for part in parts])
    assert torch.equal(w.rows(ids), weight[ids])
    described = kind.take(TensorTake({name: tensor.to("meta") for name, tensor in tensors.items()}), parts)
    assert [t.shape for t in tensors_of(described)] == [t.shape for t in tensors_of(w)]
    assert described.nbytes == w.nbytes


def test_the_kind_follows_from_device_and_dtype() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert kinds.linear_kind(cpu, dtype) is Packed
        assert kinds.linear_kind(gpu, dtype) is Dense


@pytest.mark.parametrize("in_features", [32, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_compressed_parts_are_one_layer_with_the_bits_of_the_packed_one(bias: bool, in_features: int) -> None:
    if not Compressed.serves(torch.device("cpu"), torch.bfloat16):
        pytest.skip("for CPUs with AVX512-BF16")
    torch.manual_seed(0)
    parts = [StoredLinear(name, size, in_features, bias) for name, size in (("q", 65), ("k", 16), ("v", 50))]
    tensors = {f"{part.name}.weight": torch.randn(part.out_features, in_features).bfloat16() for part in parts}
    tensors |= {f"{part.name}.bias": torch.randn(part.out_features).bfloat16() for part in parts if bias}
    w, packed, twice = (kind.take(TensorTake(tensors), parts) for kind in (Compressed, Packed, KeptTwice))
    x, ids = torch.randn(3, in_features).bfloat16(), torch.tensor([0, 64, 65, 130])
    assert isinstance(w, Linear)
    assert isinstance(twice, KeptTwice)
    for layer in (w, twice):
        assert torch.equal(layer.apply(x), packed.apply(x))
        assert torch.equal(layer.apply(x.repeat(9, 1)), packed.apply(x.repeat(9, 1)))
        assert torch.equal(layer.rows(ids), packed.rows(ids))
        assert layer.nbytes == w.nbytes
    assert w.nbytes == 131 * in_features * 3 // 2 + (131 * 2 if bias else 0)
    described = Compressed.take(TensorTake({name: tensor.to("meta") for name, tensor in tensors.items()}), parts)
    assert [t.shape for t in tensors_of(described)] == [t.shape for t in tensors_of(w)]


def test_compressed_layers_serve_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda op: True)
    for isa, dtype, device, wanted in (
        ("avx512_bf16", torch.bfloat16, "cpu", True),
        ("avx512_bf16", torch.float32, "cpu", False),
        ("avx512_bf16", torch.bfloat16, "cuda", False),
        ("amx", torch.bfloat16, "cpu", True),
        ("avx512", torch.bfloat16, "cpu", False),
    ):
        monkeypatch.setattr(native, "best_isa", lambda isa=isa: isa)
        assert Compressed.serves(torch.device(device), dtype) == wanted


def test_without_a_compiler_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_available", lambda op: False)
    assert kinds.linear_kind(torch.device("cpu"), torch.float32) is Dense


def test_exact_takes_the_first_kind_with_one_order() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert kinds.linear_kind(cpu, dtype, exact=True) is Packed
        assert kinds.linear_kind(gpu, dtype, exact=True) is Exact


class Int8(NamedTuple):
    """A kind of a test's own: weights rounded to 8 bits, with a scale for each output."""

    codes: Tensor  # [out_features, in_features] int8
    scale: Tensor  # [out_features, 1]
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self if t is not None)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return ()

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes * self.scale, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self.codes[ids] * self.scale[ids]

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        return True

    @staticmethod
    def is_exact() -> bool:
        return False

    @classmethod
    def take(cls, take: Take, parts: Sequence[StoredLinear]) -> "Int8":
        dense = Dense.take(take, parts)
        scale = dense.weight.abs().amax(1, keepdim=True) / 127
        return cls((dense.weight / scale).round().to(torch.int8), scale, dense.bias)

    @staticmethod
    def take_table(take: Take, part: StoredLinear) -> Dense:
        return Dense.take_table(take, part)

    @staticmethod
    def bytes_while_taking(nbytes: int) -> int:
        return 4 * nbytes


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_a_kind_of_ones_own_serves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens() -> list[int]:
        sizes = {"bucket_sizes": (2,), "num_kv_blocks": 20, "max_model_len": 64}
        with CompiledEngine(str(checkpoint(name)), enforce_eager=True, **sizes) as engine:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            (output,) = engine.generate([[5, 6, 7]], params, use_tqdm=False)
            assert type(engine.runner.steps.weights.head) is kinds.KINDS[0]
            return list(output.outputs[0].token_ids)

    plain = tokens()
    monkeypatch.setattr(kinds, "KINDS", (Int8,))
    assert len(tokens()) == len(plain) == 8
    config = read_config(checkpoint(name))
    weights = [family_of(config).describe(config, linears=kind).weights for kind in (Dense, Int8)]
    read = [ModelWork.of(config, each, (1, 1)).weight_bytes_per_step for each in weights]
    assert 0.25 < read[1] / read[0] < 0.3
