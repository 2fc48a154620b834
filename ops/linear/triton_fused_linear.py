"""The linear layer with norm, activation and residual on the GPU: its Triton kernel, and the launch.

``fused_linear.py`` says what it computes. A program has some rows and outputs, with a gated activation the gates
and ups of the same outputs. It computes the norms of its rows by itself: they are small, and in the cache after the
first one. So it does with what is still to be added to them; the programs of the first outputs store the sums.

Why a row's bits do not depend on how many rows there are, up to 32: a program has 16 rows and adds up the inputs,
``BLOCK_K`` at a time, from the first to the last by ``mma.sync``, and what the norms of a row need block by block. How
many outputs it has follows from the layer alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.product_choices import FusedTile, Product, choose
from compiled_llm.ops.linear.triton_linear import gpu_name, inside_inputs, multiply_add
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.rowwise import reference
from compiled_llm.ops.rowwise.triton_kernels import activated, cast, inverse_rms, rounded, weighted
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows
from compiled_llm.ops.triton_programmatic import prefetch_rows, wait_for_launches_before

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes
_NORMED_AT_ONCE = 256


# (plain, gated): the latter has twice as many columns of weights. At most 99 KB of shared memory, and two or three
# programs an SM: estimated from bytes in flight, not measured.
FEW_OUTPUTS = (FusedTile(16, 16, 256, 4, 4), FusedTile(16, 16, 256, 4, 3))
MANY_OUTPUTS = (FusedTile(16, 32, 128, 4, 6), FusedTile(16, 32, 128, 4, 4))
_MANY = 8192  # outputs from which tiles of 32 are enough for every SM to have some
# Gated products of more rows: weights are read once or twice, so by tiles for ``wgmma`` where there is such.
MORE_ROWS = (FusedTile(64, 64, 64, 4, 3), FusedTile(128, 64, 64, 4, 3))


def tile_for(rows: int, outputs: int, gated: bool, normed: bool) -> FusedTile:
    """The tile of a layer of so many outputs, unless a file has another (``product_choices.py``)."""
    few = FEW_OUTPUTS[gated]
    if gated and rows > 2 * few.m:  # which would read the weights more than twice
        return next((tile for tile in MORE_ROWS if rows <= tile.m), MORE_ROWS[-1])
    if outputs > _MANY:
        return MANY_OUTPUTS[gated]
    # Each program norms its rows, so with more to do for that there are half as many. Inputs are as many at a time.
    is_wide = normed and rows > (few.m if gated else 1)
    return few._replace(n=2 * few.n, stages=few.stages - 1) if is_wide else few


@triton.jit
def _inputs(
    x_rows, delta_rows, delta_scale, delta_norm, sum_scale, k, inner, inside_rows, dtype: tl.constexpr,
    IN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The inputs ``k + inner`` of some rows, with what is added to them, as float32 of ``dtype``'s precision."""
    places = k + inner[None, :]
    known = inside_inputs(inner, k, IN, IN % BLOCK == 0)
    inside = inside_rows & known[None, :]
    y = tl.load(x_rows + places, mask=inside, other=0.0).to(tl.float32)
    if delta_rows is not None:
        delta = tl.load(delta_rows + places, mask=inside, other=0.0).to(tl.float32)
        if delta_norm is not None:
            weights = tl.load(delta_norm + k + inner, mask=known, other=0.0)[None, :]
            delta = weighted(delta * delta_scale, weights, dtype).to(tl.float32)
        y = rounded(y + delta, dtype)
        if sum_scale is not None:
            y = rounded(y * sum_scale, dtype)
    return y


@triton.jit
def _inverse_rms_of_rows(
    x_rows, delta_rows, delta_scale, delta_norm, sum_scale, inside_rows, eps, dtype: tl.constexpr,
    IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of rows of ``_inputs``, ``[BLOCK_M, 1]``, or of one row, ``[1, 1]``.

    Of few rows the squares are those on the diagonal of the product with themselves: a fraction of the instructions,
    and an order that does not depend on how many rows there are.
    """
    inner = tl.arange(0, BLOCK)
    if BLOCK_M == 16:
        products = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
        for k in range(0, IN, BLOCK):
            y = _inputs(x_rows, delta_rows, delta_scale, delta_norm, sum_scale, k, inner, inside_rows, dtype, IN, BLOCK)
            a = tl.broadcast_to(cast(y, dtype), [BLOCK_M, BLOCK])
            products = multiply_add(a, tl.trans(a), products)
        place = tl.arange(0, BLOCK_M)
        squares = tl.sum(tl.where(place[:, None] == place[None, :], products, 0.0), 1)
        if inside_rows.shape[0] == 1:
            squares = tl.max(squares, 0, keep_dims=True)  # they are all the same
        # Not divided and rooted to the last bit: the slow ways of that are calls, around which registers spill.
        return tl.rsqrt(squares * (1.0 / IN) + eps)[:, None]
    else:
        sums = tl.zeros([BLOCK_M, 1], tl.float32)
        for k in range(0, IN, BLOCK):
            y = _inputs(x_rows, delta_rows, delta_scale, delta_norm, sum_scale, k, inner, inside_rows, dtype, IN, BLOCK)
            sums += tl.sum(y * y, 1)[:, None]
        return inverse_rms(sums, eps, IN)[:, None]


@triton.jit
def _mean_and_inverse_deviation(
    x_rows, delta_rows, delta_scale, delta_norm, sum_scale, inside_rows, eps, dtype: tl.constexpr,
    IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of rows of ``_inputs``, ``[BLOCK_M, 1]`` each. Those of blocks are joined (Chan et al., 1979): one pass."""
    inner = tl.arange(0, BLOCK)
    mean = tl.zeros([BLOCK_M, 1], tl.float32)
    squares = tl.zeros([BLOCK_M, 1], tl.float32)
    for k in range(0, IN, BLOCK):
        y = _inputs(x_rows, delta_rows, delta_scale, delta_norm, sum_scale, k, inner, inside_rows, dtype, IN, BLOCK)
        count = tl.sum((inner < IN - k).to(tl.float32), 0)
        block_mean = tl.sum(y, 1)[:, None] / count
        centred = tl.where((inner < IN - k)[None, :], y - block_mean, 0.0)
        shift = block_mean - mean
        share = count / (k + count)
        squares += tl.sum(centred * centred, 1)[:, None] + shift * shift * (k * share)
        mean += shift * share
    return mean, inverse_rms(squares, eps, IN)[:, None]


@triton.jit
def _store_sums(total, sums, rows, stored_rows, places, inside, IN: tl.constexpr):
    tl.store(total + rows * IN + places[None, :], sums, mask=(rows < stored_rows) & inside[None, :])


@triton.jit
def _with_bias(acc, bias, columns, inside, dtype: tl.constexpr):
    """The sums of ``columns`` and their biases, as float32 that has been rounded to ``dtype``."""
    if bias is not None:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return rounded(acc, dtype)


@triton.jit(do_not_specialize=["num_rows"])
def fused_linear_kernel(
    x, delta, delta_norm, sum_scale, total, weight, bias, norm, norm_bias, factor, beside, residual, out,
    num_rows, x_stride, delta_stride, factor_stride, beside_stride, residual_stride, eps,
    OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, MULTIPLIER: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_NORM: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights.

    ONE_ROW: there is one. Its inputs are made once, and take all rows of the product.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    num_m = tl.cdiv(num_rows, BLOCK_M)
    rows = (tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) // num_m * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    inside_rows, inside_columns = rows < num_rows, columns < OUT
    if PROGRAMMATIC:
        ROW_BYTES: tl.constexpr = IN * weight.dtype.element_ty.primitive_bitwidth // 8
        COUNT: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
        w_rows = weight + tl.minimum(columns, OUT - 1) * IN
        prefetch_rows(w_rows, ROW_BYTES, COUNT)
        if GATED:
            prefetch_rows(w_rows + OUT * IN, ROW_BYTES, COUNT)
        wait_for_launches_before()
    made_rows = tl.arange(0, 1).to(tl.int64)[:, None] if ONE_ROW else rows
    inside_made = made_rows < num_rows
    x_rows, delta_rows, delta_scale = x + made_rows * x_stride, delta, 1.0
    if sum_scale is not None:
        sum_scale = tl.load(sum_scale)
    if delta is not None:
        delta_rows = delta + made_rows * delta_stride
        if delta_norm is not None:
            delta_scale = _inverse_rms_of_rows(
                delta_rows, None, 1.0, None, None, inside_made, eps, dtype, IN, BLOCK_M, BLOCK_NORM
            )  # fmt: skip
    if norm_bias is not None:
        mean, scale = _mean_and_inverse_deviation(
            x_rows, delta_rows, delta_scale, delta_norm, sum_scale, inside_made, eps, dtype, IN, BLOCK_M, BLOCK_NORM
        )  # fmt: skip
    elif norm is not None:
        scale = _inverse_rms_of_rows(
            x_rows, delta_rows, delta_scale, delta_norm, sum_scale, inside_made, eps, dtype, IN, BLOCK_M, BLOCK_NORM
        )  # fmt: skip
    stored_rows = tl.where(tl.program_id(0) < num_m, num_rows, 0)  # of the sums: by the programs of the first outputs
    w_tile = weight + columns[:, None] * IN + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = inside_inputs(inner, k, IN, IN % BLOCK_K == 0)
        inside_weight = inside_columns[:, None] & inside[None, :]
        if norm is None and delta is None:
            a = tl.load(x + rows * x_stride + (k + inner)[None, :], mask=inside_rows & inside[None, :], other=0.0)
        else:
            y = _inputs(
                x_rows, delta_rows, delta_scale, delta_norm, sum_scale, k, inner, inside_made, dtype, IN, BLOCK_K
            )
            sums = cast(y, dtype)
            a = sums
            if norm is not None:
                if total is not None:
                    _store_sums(total, sums, made_rows, stored_rows, k + inner, inside, IN)
                weights = tl.load(norm + k + inner, mask=inside, other=0.0)[None, :]
                if norm_bias is not None:
                    shifts = tl.load(norm_bias + k + inner, mask=inside, other=0.0).to(tl.float32)[None, :]
                    a = cast((y - mean) * scale * weights.to(tl.float32) + shifts, dtype)
                else:
                    a = weighted(y * scale, weights, dtype)
            a = tl.broadcast_to(a, [BLOCK_M, BLOCK_K])
        b = tl.load(w_tile + k, mask=inside_weight, other=0.0)
        acc = multiply_add(a, tl.trans(b), acc)
        if GATED:
            b = tl.load(w_tile + OUT * IN + k, mask=inside_weight, other=0.0)
            up = multiply_add(a, tl.trans(b), up)
        if total is not None and norm is None:  # behind the product: before it that takes 40 registers more
            _store_sums(total, sums, made_rows, stored_rows, k + inner, inside, IN)
    y = _with_bias(acc, bias, columns, inside_columns, dtype)
    if ACTIVATION != "":
        y = rounded(activated(y, ACTIVATION), dtype)
        if GATED:
            y = rounded(y * _with_bias(up, bias, OUT + columns, inside_columns, dtype), dtype)
    if MULTIPLIER != 1.0:
        y = rounded(y * MULTIPLIER, dtype)
    inside = inside_rows & inside_columns[None, :]
    if factor is not None:
        factors = tl.load(factor + rows * factor_stride + columns[None, :], mask=inside, other=0.0)
        y = rounded(y * factors.to(tl.float32), dtype)
    if beside is not None:
        places = beside + rows * beside_stride + columns[None, :]
        y = rounded(y + tl.load(places, mask=inside, other=0.0).to(tl.float32), dtype)
    if residual is not None:
        places = residual + rows * residual_stride + columns[None, :]
        y += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows * OUT + columns[None, :], cast(y, dtype), mask=inside)


def fused_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, norm_bias: Tensor | None, eps: float,
    activation: str, gated: bool, multiplier: float, beside: Tensor | None, residual: Tensor | None,
    tile: FusedTile | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    ``tile`` replaces that of this GPU: ``scripts/tune_linear.py`` looks for a better one.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an unknown activation.
    """
    return _launch(
        "fused_linear", x, None, None, weight, bias, norm, norm_bias, eps, activation, gated, multiplier, beside,
        residual, tile=tile,
    )[1]  # fmt: skip


def add_fused_linear(
    x: Tensor, delta: Tensor, delta_norm: Tensor | None, scale: Tensor | None, weight: Tensor, bias: Tensor | None,
    norm: Tensor | None, norm_bias: Tensor | None, eps: float, activation: str, gated: bool, factor: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Likewise."""
    total, out = _launch(
        "add_fused_linear", x, delta, delta_norm, weight, bias, norm, norm_bias, eps, activation, gated, 1.0, None,
        None, scale, factor,
    )  # fmt: skip
    assert total is not None
    return total, out


def _launch(
    op: str, x: Tensor, delta: Tensor | None, delta_norm: Tensor | None, weight: Tensor, bias: Tensor | None,
    norm: Tensor | None, norm_bias: Tensor | None, eps: float, activation: str, gated: bool, multiplier: float,
    beside: Tensor | None, residual: Tensor | None, scale: Tensor | None = None, factor: Tensor | None = None,
    tile: FusedTile | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    gated = gated and activation != ""
    x, x_stride = aligned_rows(x, op, "x", _DTYPES)
    _check(op, x, weight, activation, gated)
    size = x.shape[1]
    _check_vectors(
        op, x, {"weight": (weight, weight.shape), "bias": (bias, weight.shape[:1]), "delta_norm": (delta_norm, (size,)),
                "norm": (norm, (size,)), "norm_bias": (norm_bias, (size,))},
    )  # fmt: skip
    (rows, in_features), out_features = x.shape, weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(rows, out_features)
    delta, delta_stride = _rows_like(delta, op, "delta", x)
    beside, beside_stride = _rows_like(beside, op, "beside", out)
    residual, residual_stride = _rows_like(residual, op, "residual", out)
    _check_factors(op, scale, factor, out)
    total = None if delta is None else x.new_empty(x.shape)
    if not out.numel():
        return total, out
    before, behind = "norm and gate" if gated else "norm", "gate" if gated else "residual"
    around = before if norm is not None or delta is not None else behind
    chosen = choose(Product(weight.shape[0], in_features, around), rows, gpu_name(x.device))
    tile = tile or chosen.tile or tile_for(rows, out_features, gated, norm is not None)
    at_once = _NORMED_AT_ONCE // (1 + (delta is not None or gated))  # what takes registers besides
    with torch.cuda.device_of(x):
        fused_linear_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(out_features, tile.n),)](
            x, delta, delta_norm, scale, total, weight, bias, norm, norm_bias, factor, beside, residual, out,
            rows, x_stride, delta_stride, 0 if factor is None else factor.stride(0), beside_stride, residual_stride,
            eps,
            OUT=out_features, IN=in_features, ACTIVATION=activation, GATED=gated, MULTIPLIER=multiplier,
            ONE_ROW=rows == 1 and norm_bias is None,  # sums of layer norms have an order by the threads that have rows
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
            BLOCK_NORM=max(16, min(at_once, triton.next_power_of_2(in_features))),
            num_warps=tile.warps,
            num_stages=tile.stages - (delta is not None),  # of which each then has a tile of deltas besides
            enable_fp_fusion=False, **launch_options(rows),
        )  # fmt: skip
    return total, out


def _check(op: str, x: Tensor, weight: Tensor, activation: str, gated: bool) -> None:
    size = x.shape[1]
    if activation and activation not in reference.ACTIVATIONS:
        raise ValueError(f"{op}: activation must be {' or '.join(reference.ACTIVATIONS)}, got {activation}")
    if weight.dim() != 2 or weight.shape[1] != size or not weight.is_contiguous() or size == 0:
        raise ValueError(f"{op}: weight must be a contiguous [N, {size}], got {list(weight.shape)}")
    if gated and weight.shape[0] % 2:
        raise ValueError(f"{op}: with a gated activation N must be even, got {weight.shape[0]}")


def _check_vectors(op: str, x: Tensor, known: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Each tensor's shape; norms of their own dtype are RMS norms' alone."""
    is_layer_norm = known["norm_bias"][0] is not None
    for name, (tensor, shape) in known.items():
        if tensor is None:
            continue
        may_be_float32 = name == "delta_norm" or (name == "norm" and not is_layer_norm)
        dtypes = (x.dtype, torch.float32) if may_be_float32 else (x.dtype,)
        fits = tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0
        if not fits or tensor.dtype not in dtypes or tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} must be a contiguous {list(shape)} of {' or '.join(map(str, dtypes))} on "
                f"{x.device}, aligned to {_ALIGNMENT} bytes; got {list(tensor.shape)} of {tensor.dtype} on "
                f"{tensor.device}"
            )
    if is_layer_norm and known["norm"][0] is None:
        raise ValueError(f"{op}: norm_bias is that of a layer norm, which needs norm, got None")


def _check_factors(op: str, scale: Tensor | None, factor: Tensor | None, out: Tensor) -> None:
    if scale is not None and (scale.shape, scale.dtype, scale.device) != ((1,), torch.float32, out.device):
        raise ValueError(
            f"{op}: scale must be [1] of torch.float32 on {out.device}, got {list(scale.shape)} of {scale.dtype} on "
            f"{scale.device}"
        )
    if factor is None:
        return
    if (factor.shape, factor.dtype, factor.device) != (out.shape, out.dtype, out.device) or factor.stride(1) != 1:
        raise ValueError(
            f"{op}: factor must be {list(out.shape)} of {out.dtype} on {out.device} with the last stride 1, got "
            f"{list(factor.shape)} of {factor.dtype} on {factor.device} with strides {list(factor.stride())}"
        )


def _rows_like(tensor: Tensor | None, op: str, name: str, like: Tensor) -> tuple[Tensor | None, int]:
    """``tensor``, if it is given, and the distance of its rows."""
    if tensor is None:
        return None, 0
    if (tensor.shape, tensor.dtype, tensor.device) != (like.shape, like.dtype, like.device):
        what = "x" if name == "delta" else "the result"
        raise ValueError(
            f"{op}: {name} must be like {what}, {list(like.shape)} of {like.dtype} on {like.device}, got "
            f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )
    return aligned_rows(tensor, op, name, _DTYPES)
