"""Linear layers and experts: the engine's op beside the other ways to compute the same, on a CPU or a GPU.

    compiled-llm bench products --rows 1 8 32 --threads 4               # packed weights beside F.linear, on a CPU
    compiled-llm bench products --kind int4_w4a8 --layers gate_up down --rows 1 32 2048
    compiled-llm bench products --experts --rows 1                      # of published models
    compiled-llm bench products --device cuda --shape llama-3.1-8b --around
    compiled-llm bench products --device cuda --kind int8 int4 --size 6144x4096 1536x2048x128x8

What is timed, in turns, each call with other weights than the one before, so that none are in a cache:

    op         the engine's: packed weights on a CPU, on a GPU its kernel with one order of sums
    linear     F.linear; beside quantised weights the layer as the engine has it in --dtype; beside experts on a CPU a
               dense packed layer that reads as many bytes
    inductor   on a GPU, F.linear as torch's compiler makes it for this size. Its own settings decide which: with
               TORCHINDUCTOR_MAX_AUTOTUNE=1 and TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 it tries its Triton kernels
    int_mm     on a GPU torch._int_mm and the scaling of its sums, where the layer can have it
    int4pack   on a GPU torch's int4 product, of int4 in groups with activations as they are

--size names a layer by OUTPUTSxINPUTS, experts by OUTPUTSxINPUTSxEXPERTSxUSED, of which a token uses USED. With
--around the gate or the residual that follows a layer is part of it, and a line for each number of rows has a decoder
layer's four products behind each other, with norms ("programmatic": launched before the one before has ended).

GB/s counts the weights that are read, with their scales; on a CPU `of read` is that rate relative to a plain sum's in
the same rounds. `faster` is the median of the ratios of linear to op within a round. Each way is checked against plain
torch. If the op is wrong, the exit status is 1; another way that does not run or is wrong is left out, and the reason
printed. On a GPU kernels are compiled first, in parallel processes, for --compile-seconds; cases that --limit leaves no
time for are left out. In Triton's interpreter (``TRITON_INTERPRET=1``) a GPU's quantised kernels run on a CPU, which
checks the program: such times mean nothing.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from compiled_llm import ops
from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.bench.harness import (
    STATISTICS,
    TORCH_DTYPES,
    Row,
    Run,
    WrongResultError,
    add_case_flags,
    call_seconds,
    copies_of,
    finish,
    has_gpu,
    limit_runs,
    median_ratio,
    reason_of,
    run_cases,
)
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.compiling.compiler import compile_at_first_call, own_copy
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.layers.residual import BlockOutput, Residual
from compiled_llm.models.linears import fused
from compiled_llm.models.linears.dense import Dense, counters_on
from compiled_llm.models.linears.quantizing import KINDS
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import linears
from compiled_llm.ops import native
from compiled_llm.ops.linear.exact_linear import exact_linear
from compiled_llm.ops.linear.packed_linear import empty_packed, pack_weight, packed_linear
from compiled_llm.ops.linear.quantized_linear import quantized_linear
from compiled_llm.ops.linear.quantized_linear_a8 import (
    quantize_activations,
    quantize_activations_by_groups,
    quantized_linear_a8,
)
from compiled_llm.ops.linear.quantized_tiles import INT_MM_ROWS, Choice, takes_int_mm
from compiled_llm.ops.linear.quantized_tiles import Layer as TileLayer
from compiled_llm.ops.linear.quantized_weight import (
    QuantizedRows,
    QuantizedWeight,
    dequantize,
    empty_quantized,
    pack_quantized_rows,
    quantize,
)
from compiled_llm.ops.linear.quantized_weight_gpu import empty_quantized_gpu, pack_quantized_rows_gpu
from compiled_llm.ops.linear.surroundings import Surroundings, surrounded
from compiled_llm.ops.moe.grouped_linear import grouped_linear, grouped_packed_linear
from compiled_llm.ops.programmatic_launch import programmatic_launches
from compiled_llm.ops.torch_private import int4_mm, int4_packed

CHECKED_ROWS = 32
EPS = 1e-5
Route = tuple[Tensor | None, Tensor]  # ``rows`` and ``starts`` of ``grouped_linear``


class Layer(NamedTuple):
    """A linear layer, or with ``experts`` a mixture's, of which a token uses ``used``.

    Attributes:
        own_rows: each chosen expert has a row of its own, not the token's.
        after: what follows it in a model: "gate", "residual" or "".
    """

    name: str
    outputs: int
    inputs: int
    experts: int = 0
    used: int = 0
    own_rows: bool = False
    after: str = ""

    def flops(self, tokens: int) -> float:
        """Of the products of so many tokens."""
        return 2.0 * self.outputs * self.inputs * tokens * (self.used or 1)


EXPERTS = (
    Layer("qwen3-30b-a3b gate_up", 1536, 2048, 128, 8),
    Layer("qwen3-30b-a3b down", 2048, 768, 128, 8, own_rows=True),
    Layer("gpt-oss-20b gate_up", 5760, 2880, 32, 4),
    Layer("gpt-oss-20b down", 2880, 2880, 32, 4, own_rows=True),
)
_NAMES = {"qkv": "", "o": "residual", "gate_up": "gate", "down": "residual"}  # and what follows


def layers_of(shape: str) -> list[Layer]:
    """A model's linear layers, each once, in their order; by name where they are those of a plain decoder."""
    config = parse_config(SHAPES[shape])
    weights = family_of(config).describe(config, torch.bfloat16, Dense).weights
    sizes = dict.fromkeys((layer.out_features, layer.in_features) for layer in linears(weights))
    head = config.vocab_size, config.hidden_size
    inner = [size for size in sizes if size != head]
    if len(inner) != len(_NAMES):
        return [Layer(f"{outputs}x{inputs}", outputs, inputs) for outputs, inputs in sizes]
    named = [Layer(name, *size, after=after) for (name, after), size in zip(_NAMES.items(), inner, strict=True)]
    return [*named, Layer("lm_head", *head)]


def parse_layer(text: str) -> Layer:
    """OUTPUTSxINPUTS, or OUTPUTSxINPUTSxEXPERTSxUSED, for argparse."""
    sizes: list[Any] = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
    if len(sizes) not in (2, 4) or not all(sizes) or (len(sizes) == 4 and sizes[3] > sizes[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither OUTPUTSxINPUTS nor OUTPUTSxINPUTSxEXPERTSxUSED")
    return Layer(text, *sizes)


class Case(NamedTuple):
    """The ways to compute a layer for some rows.

    Attributes:
        ways: name -> run, given the number of a copy: of the weights, or of experts of which another few are used, so
            that what is read comes from memory; nbytes: weights that a run reads, by name.
        want: ``[<= CHECKED_ROWS, outputs]`` float32, the first rows of the result for copy 0.
        flops: of the products.
    """

    ways: dict[str, Run]
    nbytes: dict[str, int]
    want: Tensor
    flops: float
    copies: int


def routed(tokens: int, layer: Layer, device: str) -> Route:
    """For tokens that choose at random."""
    chosen = torch.rand(tokens, layer.experts, device=device).topk(layer.used).indices.flatten()
    starts = torch.cat([chosen.new_zeros(1), chosen.bincount(minlength=layer.experts).cumsum(0)])
    rows = None if layer.own_rows else (chosen.argsort(stable=True) // layer.used).int()
    return rows, starts.int()


def right(
    layer: Layer, x: Tensor, plain: Tensor, route: Route | None, activations: str = "", group_size: int = 0
) -> Tensor:  # fmt: skip
    """Outputs of the first rows in plain torch, float32, for weights ``plain`` ``[N, K]`` or ``[E, N, K]``."""
    if route is None:
        x, matrices = x[:CHECKED_ROWS], plain
    else:
        rows, starts = route
        places = torch.arange(min(CHECKED_ROWS, int(starts[-1])), device=x.device)
        x = x[places if rows is None else rows[places].long()]
        matrices = plain[torch.searchsorted(starts.long(), places, right=True) - 1]
    if activations == "int8":
        codes, scales = quantize_activations(x, None)
        x = codes * scales[:, None]
    if activations == "int8_groups":
        codes, scales = quantize_activations_by_groups(x, group_size)
        x = codes * scales.repeat_interleave(group_size, 1)[:, : x.shape[1]]
    if route is None:
        return F.linear(x.float(), matrices.float())
    return torch.einsum("tk,tnk->tn", x.float(), matrices.float())


def case_of(layer: Layer, kind: str, tokens: int, args: argparse.Namespace) -> Case:
    """``kind``: "plain", or one of ``KINDS``."""
    if kind != "plain":
        return quantized_case(layer, kind, tokens, args)
    if layer.experts:
        return experts_case(layer, tokens)
    return cpu_case(layer, tokens, args) if args.device == "cpu" else gpu_case(layer, tokens, args)


def cpu_case(layer: Layer, tokens: int, args: argparse.Namespace) -> Case:
    """The packed linear beside ``F.linear``."""
    dtype = TORCH_DTYPES[args.dtype]
    nbytes = layer.outputs * layer.inputs * dtype.itemsize
    copies = copies_of(nbytes)
    weights = [torch.randn(layer.outputs, layer.inputs).to(dtype) for _ in range(copies)]
    packed, x = [pack_weight(weight) for weight in weights], torch.randn(tokens, layer.inputs).to(dtype)
    ways: dict[str, Run] = {
        "op": lambda copy: packed_linear(x, packed[copy % copies], None, layer.outputs),
        "linear": lambda copy: F.linear(x, weights[copy % copies]),
    }
    return Case(ways, dict.fromkeys(ways, nbytes), right(layer, x, weights[0], None), layer.flops(tokens), copies)


def experts_case(layer: Layer, tokens: int) -> Case:
    """The experts of some tokens beside a dense packed layer with as many outputs, and so of the same bytes."""
    packed = empty_packed(layer.experts * layer.outputs, layer.inputs, torch.bfloat16, torch.device("cpu"))
    packed.copy_(torch.randn(packed.shape[1:], dtype=torch.bfloat16))
    each = packed.unflatten(0, (layer.experts, -1))
    for expert, weights in enumerate(each):
        weights.mul_(1 + expert / layer.experts)  # experts differ: another one would be a wrong result
    copies = layer.experts // layer.used
    dense = packed[: copies * layer.used * (len(packed) // layer.experts)].unflatten(0, (copies, -1))  # the same memory
    routes = [routed(tokens, layer, "cpu") for _ in range(copies)]
    x = torch.randn(tokens * (layer.used if layer.own_rows else 1), layer.inputs, dtype=torch.bfloat16)
    outputs = layer.used * layer.outputs
    ways: dict[str, Run] = {
        "op": lambda copy: grouped_packed_linear(x, each, None, *routes[copy % copies], layer.outputs),
        "linear": lambda copy: packed_linear(x[:tokens], dense[(copy + copies // 2) % copies], None, outputs),
    }
    rows, starts = routes[0]
    experts = torch.arange(layer.experts).repeat_interleave(starts.diff())[:CHECKED_ROWS]
    one = [x[place if rows is None else rows[place]][None] for place in range(len(experts))]
    want = [packed_linear(x, each[e], None, layer.outputs) for x, e in zip(one, experts, strict=True)]
    nbytes = 2 * outputs * layer.inputs
    return Case(ways, dict.fromkeys(ways, nbytes), torch.cat(want).float(), layer.flops(tokens), copies)


def gpu_case(layer: Layer, tokens: int, args: argparse.Namespace) -> Case:
    """The engine's product beside cuBLAS and what torch's compiler makes of it."""
    weight = torch.randn(layer.outputs, layer.inputs, device="cuda", dtype=torch.bfloat16) / layer.inputs**0.5
    copies = copies_of(weight.nbytes)
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]
    x = torch.randn(tokens, layer.inputs, device="cuda").bfloat16()
    after = layer.after if args.around else ""
    residual = torch.randn(tokens, layer.outputs, device="cuda").bfloat16() if after == "residual" else None
    around = Surroundings(activation="silu" if after == "gate" else "", residual=residual)
    counters = counters_on(x.device, layer.outputs, layer.inputs)

    def linear(copy: int) -> Tensor:
        y = F.linear(x, weights[copy % copies])
        y = ops.gated_activation(y, "silu") if around.activation else y
        return y if residual is None else y + residual

    ways: dict[str, Run] = {
        "op": lambda copy: exact_linear(x, weights[copy % copies], None, around, counters),
        "linear": linear,
    }
    if not after:
        name = f"linear_{layer.outputs}_{layer.inputs}_{tokens}"
        compiled = compile_at_first_call(own_copy(plain_linear, name), cuda_graphs=False)
        ways["inductor"] = lambda copy: compiled(x, weights[copy % copies])
    first = around._replace(residual=None if residual is None else residual[:CHECKED_ROWS].float())
    want = surrounded(lambda x: F.linear(x, weight.float()), x[:CHECKED_ROWS].float(), *first)
    return Case(ways, dict.fromkeys(ways, weight.nbytes), want, layer.flops(tokens), copies)


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def quantized_case(layer: Layer, kind: str, tokens: int, args: argparse.Namespace) -> Case:
    """An op on quantised weights beside the layer in ``--dtype`` as the engine has it."""
    device, scheme = args.device, KINDS[kind]
    form, dtype = scheme.form, TORCH_DTYPES[args.dtype]
    packed, rows, exactly = _quantized(layer, kind, device)
    plain = exactly.to(dtype)
    used = layer.used or 1
    routes = [routed(tokens, layer, device) for _ in range(layer.experts // used)] if layer.experts else []
    num = len(routes) or copies_of(form.nbytes(layer.outputs, layer.inputs))
    copies = [packed] if layer.experts else [_copy(packed) for _ in range(num)]
    num_plain = len(routes) or copies_of(plain.nbytes)
    plains = [plain] if layer.experts else [plain.clone() for _ in range(num_plain)]
    if device == "cpu" and not routes:
        plains = [pack_weight(weight) for weight in plains]
    x = torch.randn(tokens * (used if layer.own_rows else 1), layer.inputs, device=device).to(dtype)

    def linear(copy: int) -> Tensor:
        if routes:
            return grouped_linear(x, plains[0], None, *routes[copy % num])
        weight = plains[copy % num_plain]
        return packed_linear(x, weight, None, layer.outputs) if device == "cpu" else F.linear(x, weight)

    launch = op_of(layer, kind, x)
    ways: dict[str, Run] = {
        "op": lambda copy: launch(copies[copy % len(copies)], routes[copy % num] if routes else None),
        "linear": linear,
    }
    if (device == "cuda" or interprets()) and not routes:
        tile = TileLayer(*form[:3], scheme.int8_activations, 2, layer.outputs, layer.inputs)
        if takes_int_mm(tile) and tokens > INT_MM_ROWS:
            library = op_of(layer, kind, x, Choice(tokens, "int_mm"))
            ways["int_mm"] = lambda copy: library(copies[copy % num], None)
        if kind == "int4" and device == "cuda" and layer.outputs % 8 == 0 and layer.inputs % 128 == 0:
            ways["int4pack"] = int4pack(rows, x, form.group_size)
    read = int((routes[0][1].diff() > 0).sum()) if routes else 1  # matrices
    nbytes = dict.fromkeys(ways, read * form.nbytes(layer.outputs, layer.inputs))
    nbytes["linear"] = read * layer.outputs * layer.inputs * dtype.itemsize
    want = right(layer, x, exactly, routes[0] if routes else None, scheme.activations or "", form.group_size)
    return Case(ways, nbytes, want, layer.flops(tokens), max(num, num_plain))


def op_of(layer: Layer, kind: str, x: Tensor, choice: Choice | None = None) -> Callable[..., Tensor]:
    """The launch of a layer on quantised weights; ``choice`` is of a GPU's product, None: the engine's own."""
    (element, group, *_), a8 = KINDS[kind].form, KINDS[kind].int8_activations
    of: tuple = (element, group, layer.outputs)
    before = (None, None) if a8 else (None,)  # bias, x_scale
    if a8:
        of = KINDS[kind].by_groups, *of
    if not x.is_cuda and not interprets():
        cpu: Callable[..., Tensor] = quantized_linear_a8 if a8 else quantized_linear
        return lambda weight, route: cpu(x, *weight, *before, *of)
    from compiled_llm.ops.linear import triton_quantized, triton_quantized_a8
    from compiled_llm.ops.moe import triton_quantized_grouped as grouped

    own: Any = triton_quantized_a8.quantized_linear_a8 if a8 else triton_quantized.quantized_linear
    if layer.experts:
        own = grouped.grouped_quantized_linear_a8 if a8 else grouped.grouped_quantized_linear
    return lambda weight, route: own(x, *weight, *before, *(route or ()), *of, choice=choice)


def int4pack(rows: QuantizedRows, x: Tensor, group_size: int) -> Run:
    """torch's int4 product, of activations as they are."""
    packed, scales = int4_packed((rows.codes + 8).to(torch.uint8)), rows.scales.t().bfloat16()
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], 2).contiguous()
    copies = [packed.clone() for _ in range(copies_of(packed.nbytes))]
    return lambda copy: int4_mm(x, copies[copy % len(copies)], group_size, scales_and_zeros)


def _quantized(layer: Layer, kind: str, device: str) -> tuple[QuantizedWeight, QuantizedRows, Tensor]:
    """A layer's packed weights, the rows of the last matrix, and all of it dequantised, float32."""
    form, sizes = KINDS[kind].form, (layer.outputs, layer.inputs)
    on_gpu = device == "cuda" or interprets()
    packed: Any
    if on_gpu:
        packed = empty_quantized_gpu(form, *sizes, torch.device(device), layer.experts or None)
    else:
        packed = empty_quantized(form, *sizes, torch.device(device))
    plain = torch.empty(layer.experts or 1, *sizes, device=device)
    for expert in range(layer.experts or 1):
        rows = quantize(torch.randn(sizes, device=device) / layer.inputs**0.5, form)
        to = packed.expert(expert) if layer.experts else packed
        (pack_quantized_rows_gpu if on_gpu else pack_quantized_rows)(to, 0, rows, form)
        plain[expert] = dequantize(rows, form)
    return packed, rows, plain if layer.experts else plain[0]


def _copy(packed: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(*(None if part is None else part.clone() for part in packed))  # type: ignore[arg-type]


def interprets() -> bool:
    """Whether Triton's interpreter runs a GPU's kernels on this CPU, to check this program."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def chain(layers: list[Layer], tokens: int) -> Case:
    """A decoder layer's four products behind each other, with norms, gate and residuals, without attention, on a GPU.

    "op" is as the engine runs them; "linear" are cuBLAS and single ops; "programmatic": with launches that begin while
    the one before still runs.
    """
    sizes = [(layer.outputs, layer.inputs) for layer in layers if layer.name != "lm_head"]
    nbytes = 2 * sum(outputs * inputs for outputs, inputs in sizes)
    copies = copies_of(nbytes)
    weights = [[torch.randn(s, device="cuda").bfloat16() / s[1] ** 0.5 for s in sizes] for _ in range(copies)]
    x, heads = (torch.randn(tokens, sizes[place][1], device="cuda").bfloat16() for place in (0, 1))
    norm = torch.ones_like(x[0])

    def op(copy: int) -> Tensor:
        qkv, o, gate_up, down = map(Dense, weights[copy % copies])
        y = Residual(x, EPS)
        y.normed(norm).linear(qkv)
        y += BlockOutput(heads, o)
        y += BlockOutput(y.normed(norm).linear(gate_up, "silu"), down)
        if y.delta is not None:
            y.normed(norm).tensor()
        return y.tensor()

    def linear(copy: int) -> Tensor:
        with mock.patch.object(fused, "is_fused", return_value=False):
            return op(copy)

    def early(copy: int) -> Tensor:
        with programmatic_launches():
            return op(copy)

    ways: dict[str, Run] = {"op": op, "linear": linear}
    if tokens <= 32:
        ways["programmatic"] = early
    return Case(ways, dict.fromkeys(ways, nbytes), linear(0)[:CHECKED_ROWS].float(), tokens * nbytes, copies)


# ---- timing ----------------------------------------------------------------------------------------------------------

TOLERANCE = 0.02  # of the largest output: weights and outputs are rounded to bfloat16
ROWS = {"cpu": [1, 2, 8, 32, 128, 512], "cuda": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
Sized = tuple[Layer | None, str, int]  # a layer, the kind of its weights, rows; None: all of a decoder layer


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Linear layers and experts beside other ways to compute the same.")
    add = made.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="whose layers are measured (default: qwen3-0.6b)")
    add("--layers", nargs="+", metavar="NAME", help="only these of it, such as qkv or gate_up")
    add("--size", nargs="+", type=parse_layer, metavar="SIZE", help="other layers instead, as OUTPUTSxINPUTS")
    add("--experts", action="store_true", help="the experts of two published models instead")
    add("--kind", nargs="+", choices=["plain", *KINDS], default=["plain"], help="of weights (default: plain)")
    add("--rows", nargs="+", type=int, metavar="T", help="tokens of a step (default: 1 to 512)")
    add("--around", action="store_true", help="on a GPU, with the gate or residual behind each layer")
    add("--rounds", type=int, default=200, help="of a line, at most (default: 200)")
    add_case_flags(made, 3)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    """Fills in rows and layers. ``ValueError`` for what cannot be measured."""
    args.rows = args.rows or ROWS[args.device]
    layers = list(EXPERTS) if args.experts else args.size or layers_of(args.shape)
    names = [layer.name for layer in layers]
    for name in args.layers or ():
        if name not in names:
            raise ValueError(f"--layers must be of {', '.join(names)}, given {name!r}")
    args.layers = [layer for layer in layers if args.layers is None or layer.name in args.layers]
    quantised, experts = set(args.kind) - {"plain"}, any(layer.experts for layer in args.layers)
    if experts and args.device == "cpu" and quantised and not interprets():
        raise ValueError("--kind must be plain with experts on a CPU: their quantised op is timed on a GPU alone")
    if experts and args.device == "cuda" and "plain" in args.kind:
        raise ValueError("--kind must be quantised with experts on a GPU, where plain weights are what it is beside")
    if args.around and args.device != "cuda":
        raise ValueError("--around needs --device cuda: a CPU's products have nothing around them")


def checked(case: Case) -> dict[str, str]:
    """Runs each way once; takes out of the case what does not run or is wrong, and says why."""
    left_out: dict[str, str] = {}
    for name in list(case.ways):
        try:
            got: Any = case.ways[name](0)
            if name == "linear" and got.shape[-1] != case.want.shape[-1]:
                continue  # a layer of as many bytes
            error = float((got[: len(case.want)].float() - case.want).abs().max() / case.want.abs().max())
            if not error <= TOLERANCE:
                raise WrongResultError(f"off by {error:.2g} of the largest output")
        except Exception as error:  # of foreign code, of any version: no reason to stop
            if name == "op":
                raise
            left_out[name] = str(error) if isinstance(error, WrongResultError) else reason_of(error)
            del case.ways[name]
    return left_out


def built(sized: Sized, args: argparse.Namespace) -> Case:
    layer, kind, count = sized
    return chain(args.layers, count) if layer is None else case_of(layer, kind, count, args)


def measure(sized: Sized, args: argparse.Namespace) -> Row:
    """Figures of a case: microseconds of each way, rates of the op."""
    layer, kind, count = sized
    case = built(sized, args)
    left_out = checked(case)
    limits = limit_runs("cpu", torch.float32, 16) if args.device == "cpu" else {}
    runs = case.ways | ({"read": limits["memory"][0]} if limits else {})
    options = {"seconds": args.seconds, "rounds": args.rounds, "left_out": left_out}
    times = call_seconds(runs, case.copies, args.device, **options)
    seconds = {name: STATISTICS[args.statistic](values) for name, values in times.items()}
    assert "op" in seconds, left_out
    sizes = "" if layer is None else "x".join(map(str, layer[1 : 5 if layer.experts else 3]))
    row: Row = {"layer": layer.name if layer else "all of a layer, norms", "sizes": sizes, "kind": kind, "rows": count}
    row |= {f"{name}_us": seconds[name] * 1e6 for name in seconds if name != "read"}
    rate = case.nbytes["op"] / seconds["op"]
    row["gb_per_s"] = rate / 1e9
    row["tflop_per_s"] = case.flops / seconds["op"] / 1e12
    if limits:
        row["read_gb_per_s"] = limits["memory"][1] / seconds["read"] / 1e9
        row["of read"] = rate / 1e9 / row["read_gb_per_s"]
    if "linear" in times:
        row["faster"] = median_ratio(times["linear"], times["op"])
    row["best"] = min((name for name in seconds if name != "read"), key=lambda name: seconds[name])
    return row | {"rounds": len(times["op"]), "left_out": left_out}


def compile_case(job: tuple[Sized, argparse.Namespace]) -> None:
    """In a process of its own: run the op once, so that its kernels lie compiled on disk."""
    with torch.inference_mode():
        built(*job).ways["op"](0)


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"rows": 1, "seconds": 0, "rounds": 1, "threads": 1}
    args = parser(program).parse_checked(check_arguments, arguments, **least)
    if not has_gpu(program, args.device):
        return 2
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = native.load("linear_cpu") if args.device == "cpu" else None
    path = "Triton" if args.device == "cuda" else kernels.supported_isas()[0] if kernels else "plain torch"
    what = "experts" if args.experts else "sizes as given" if args.size else args.shape
    print(f"{what}, {args.dtype}, kernels: {path}", flush=True)
    sized: list[Sized] = [(layer, kind, rows) for kind in args.kind for layer in args.layers for rows in args.rows]
    if args.around and not args.size and len(args.layers) > 3:
        sized += [(None, "plain", rows) for rows in args.rows]
    cases = {
        f"{kind}, {layer.name if layer else 'all'}, {rows} rows": (layer, kind, rows) for layer, kind, rows in sized
    }
    with errors_end(program, (WrongResultError,), status=1):
        found = list(tqdm(run_cases(args, cases, compile_case, lambda case: [measure(case, args)]), disable=None))
    rows = [row for (row,) in found]
    columns = dict.fromkeys(name for row in rows for name in row if name not in ("left_out", "rounds", "best"))
    print(tables.text_table([{name: row.get(name) for name in columns} for row in rows]))
    facts = {"shape": args.shape, "dtype": args.dtype, "kernels": path, "statistic": args.statistic}
    finish("products", facts | {"around": args.around, "results": rows}, args.json, device=args.device)
    return 0
