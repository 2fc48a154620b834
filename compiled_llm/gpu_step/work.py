"""What a launch has to do: bytes, operations, and how often its main loop runs.

Most follows from the tensors that it gets. Where it does not, as in attention, whose bytes depend on the contexts, a
function here says it for the kernel of that name. Letters as in docs/design.md.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from compiled_llm.gpu_step.amounts import Contexts, Share, Work
from compiled_llm.gpu_step.latent_work import LATENT_RULES
from compiled_llm.gpu_step.launches import Launch, TritonKernel
from compiled_llm.gpu_step.state_work import STATE_RULES


def work_of(launch: Launch, contexts: Contexts) -> Work:
    """What ``launch`` does in a step of ``contexts``."""
    if launch.triton is not None and launch.triton.generated is not None:
        return _generated(launch, launch.triton)
    if launch.kind == "product":
        return _product(launch)
    if launch.triton is not None and launch.name in _RULES:
        work = _RULES[launch.name](launch.triton.arguments, launch.triton, contexts)
        return dataclasses.replace(work, steps=_steps(launch.triton.arguments)) if work.bits else work
    if launch.triton is not None and not {"block_table", "read_slot"}.isdisjoint(launch.triton.arguments):
        raise ValueError(f"{launch.name}: its bytes depend on the requests; say in {__name__} how")
    return Work(_bytes(launch.read), _bytes(launch.written))


def _steps(a: dict[str, Any]) -> int:
    """Matrix instructions behind each other in a trip: each takes 16 inputs; of attention also 16 keys' values."""
    if "BLOCK_K" in a:
        return a["BLOCK_K"] // 16
    return (a["BLOCK_H"] + a["BLOCK_N"]) // 16 if "BLOCK_H" in a else 0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _generated(launch: Launch, kernel: TritonKernel) -> Work:
    """Of each tensor no more elements than the kernel has: it may take some rows of it alone."""
    sizes = [value for name, value in kernel.arguments.items() if name.endswith("numel")]
    elements = math.prod(sizes)
    read, written = (
        sum(min(tensor.numel(), elements) * tensor.itemsize for tensor in tensors)
        for tensors in (launch.read, launch.written)
    )
    return Work(read, written)


def _product(launch: Launch) -> Work:
    rows, inner = launch.read[-2].shape[-2:]
    outputs = launch.written[0]
    flops = 2 * outputs.numel() * inner
    padded = flops // rows * (-(-rows // 64) * 64)  # whose tiles have 64 rows or more
    return Work(_bytes(launch.read), _bytes(launch.written), flops, padded, 8 * launch.read[-1].itemsize)


# -- Kernels of the project's ops: (arguments, kernel, contexts) -> work

Arguments = dict[str, Any]


def _write(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Keys and values to the cache, if there are some; with ``cos_sin`` queries and keys are turned before."""
    made = [a[name] for name in ("k", "v") if a[name] is not None]
    new, elements = _bytes(made), sum(tensor.numel() for tensor in made)
    written = elements * a["k_cache"].itemsize + (0 if a["k_scale"] is None else elements // a["HEAD_DIM"] * 4)
    read = new + a["slot_mapping"].nbytes
    if a["cos_sin"] is not None:
        read, written = read + a["q"].nbytes + a["cos_sin"].nbytes, written + a["q"].nbytes
    # Of a token's programs those of its queries write nothing to the cache. Rows without a request, there are none.
    writing = Share(0 if a["k"] is None else kernel.grid[0] * -(-a["NUM_KV_HEADS"] // a["BLOCK_HEADS"]))
    return Work(read, written, trips=0, shares={"write_rows": writing, "_write_halves": writing})


def _key_bytes(a: Arguments) -> int:
    """Of a key and a value in one KV head."""
    row = a["k_cache"].shape[-1] * a["k_cache"].itemsize  # codes may come in pairs
    return 2 * row + (0 if a["k_scale"] is None else 8)


def _split(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    r, new, window = contexts.num_requests, contexts.num_new, a["WINDOW"]
    if not a["MIN_QUERY"] <= new <= a["MAX_QUERY"]:
        return Work(0, 0, entries=0, trips=0, shares={"merge": Share(0, is_last=True)})
    heads, head_dim = a["q"].shape[1:]
    keys, kv_heads = contexts.keys(window), a["NUM_KV_HEADS"]
    tiles = -(-new // (a["BLOCK_M"] // a["BLOCK_G"]))
    splits = num_splits(keys, new, a["SPLIT_TOKENS"])
    rows = r * new * heads
    partial = rows * splits * (head_dim + 2) * 4 if splits > 1 else 0  # written, and read by the last program
    out = rows * head_dim * a["q"].itemsize
    flops = 4 * contexts.pairs(window) * heads * head_dim
    blocks = r * kv_heads * tiles * -(-keys // a["BLOCK_N"])
    padded = 4 * blocks * a["BLOCK_N"] * a["BLOCK_M"] * a["BLOCK_H"]
    read = a["q"].nbytes + r * kv_heads * keys * _key_bytes(a) + r * -(-keys // a["BLOCK_SIZE"]) * 4
    read += partial
    rows = min(new, a["BLOCK_M"] // a["BLOCK_G"]) * a["GROUP"]  # of a tile
    merge = _merge(a, r * kv_heads * tiles, rows, splits)
    return Work(
        read, partial + out, flops, padded, 8 * a["q"].itemsize, r * kv_heads * tiles * splits, blocks,
        1 + merge.turns if merge.runs else 0, {"merge": merge},
    )  # fmt: skip


def _merge(a: Arguments, tiles: int, rows: int, splits: int) -> Share:
    """Of all tiles of query rows: each row with ``MERGE_SPLITS`` splits at once."""
    return Share(tiles if splits > 1 else 0, rows * -(-splits // a["MERGE_SPLITS"]), is_last=True)


def _decode(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Queries are turned in each split; keys and values are made once, and written."""
    from compiled_llm.ops.attention.decode_plan import splits_of
    from compiled_llm.ops.attention.tiles import decode_splits, tile_config
    from compiled_llm.ops.attention.triton_decode import device_facts

    r, keys, kv_heads = contexts.num_requests, contexts.keys(a["WINDOW"]), a["NUM_KV_HEADS"]
    heads, head_dim = a["q"].shape[1:]
    gpu, capability, num_sms = device_facts(a["q"].device)
    cache_bytes = a["v_cache"].shape[-1] * a["v_cache"].itemsize // head_dim  # codes may come in pairs
    tiles = tile_config(head_dim, a["q"].itemsize, cache_bytes, capability, gpu)
    size, splits = splits_of(keys, decode_splits(tiles, r, kv_heads, num_sms))
    partial = r * heads * splits * (head_dim + 2) * 4 if splits > 1 else 0  # written, and read by the last program
    made = 0 if a["k"] is None else r * kv_heads  # new keys
    new = 2 * made * head_dim * a["q"].itemsize + (0 if a["cos_sin"] is None else a["cos_sin"].nbytes)
    out = r * heads * head_dim * a["q"].itemsize
    blocks = r * kv_heads * sum(-(-min(size, keys - first) // a["BLOCK_N"]) for first in range(0, keys, size))
    padded = 4 * blocks * a["BLOCK_N"] * a["BLOCK_M"] * a["BLOCK_H"]
    read = out + new + r * kv_heads * _key_bytes(a) * keys + r * -(-keys // a["BLOCK_SIZE"]) * 4 + partial
    flops = 4 * contexts.pairs(a["WINDOW"]) * heads * head_dim
    merge = _merge(a, r * kv_heads, -(-a["GROUP"] // a["MERGE_HEADS"]), splits)
    shares = {
        "_merge_heads": merge,
        "_write_new": Share(made),
        "store_whole": Share(0 if splits > 1 else r * kv_heads),
    }
    return Work(
        read, partial + out + made * _key_bytes(a), flops, padded, 8 * a["q"].itemsize, r * kv_heads * splits, blocks,
        1 + merge.turns if merge.runs else 0, shares,
    )  # fmt: skip


def _alone(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """As ``_decode``. Tiles of long splits but the first are attended to by another loop; splits are joined at once."""
    from compiled_llm.ops.attention.triton_alone import NEAR

    sizes = {"BLOCK_H": a["HEAD_DIM"], "MERGE_HEADS": a["GROUP"], "MERGE_SPLITS": a["SPLITS"]}
    work, heads = _decode(a | sizes, kernel, contexts), a["NUM_KV_HEADS"]
    assert work.entries
    assert work.trips
    splits = work.entries // heads
    tiles = work.trips // work.entries  # of a split
    rest = max(0, tiles - 1) if tiles > NEAR.value else 0
    shares = {
        "_join": Share(heads if splits > 1 else 0, is_last=True),
        "store_whole": Share(0 if splits > 1 else heads),
        "_rest": Share(work.entries if rest else 0, rest),
    }
    return dataclasses.replace(
        work, trips=work.trips - rest * work.entries, round_trips=2 if splits > 1 else 0, shares=shares,
        single=frozenset({"attend", "attend_codes"}),
    )  # fmt: skip


def num_splits(keys: int, rows: int, split_tokens: int) -> int:
    """As ``_splits`` of the attention kernels: of a request with so many keys and query rows."""
    from compiled_llm.ops.attention.triton_kernels import MAX_SPLITS, MIN_MAX_SPLITS

    most = max(MAX_SPLITS.value // rows, MIN_MAX_SPLITS.value)
    return -(-keys // max(split_tokens, -(-keys // (most * 64)) * 64))


def _prefill(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    window, (heads, head_dim) = a["WINDOW"], a["q"].shape[1:]
    blocks = _causal_blocks(a, contexts)
    flops = 4 * contexts.pairs(window) * heads * head_dim
    padded = 4 * blocks * a["BLOCK_N"] * a["BLOCK_M"] * a["BLOCK_H"]
    read = a["q"].nbytes + contexts.num_requests * a["NUM_KV_HEADS"] * contexts.keys(window) * _key_bytes(a)
    tiles = contexts.num_requests * a["NUM_KV_HEADS"] * -(-contexts.num_new // (a["BLOCK_M"] // a["GROUP"]))
    entries = max(kernel.programs, tiles)
    return Work(read, a["out"].nbytes, flops, padded, 8 * a["q"].itemsize, entries, blocks)


def _causal_blocks(a: Arguments, contexts: Contexts) -> int:
    """Of keys, that all tiles of query rows pass: each up to its last row's."""
    window, tokens = a["WINDOW"], a["BLOCK_M"] // a["GROUP"]  # of a tile
    tiles = -(-contexts.num_new // tokens)
    first = contexts.num_keys - contexts.num_new
    ends = [first + min((tile + 1) * tokens, contexts.num_new) for tile in range(tiles)]
    begins = [max(0, first + tile * tokens + 1 - window) if window else 0 for tile in range(tiles)]
    blocks = sum(-(-end // a["BLOCK_N"]) - begin // a["BLOCK_N"] for begin, end in zip(begins, ends, strict=True))
    return blocks * contexts.num_requests * a["NUM_KV_HEADS"]


def _exact_attention(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """A task is a tile of query rows with one partition of the keys, or with all of them."""
    window, new = a["WINDOW"], contexts.num_new
    if not a["MIN_QUERY"] <= new <= a["MAX_QUERY"]:
        return Work(0, 0, entries=0, trips=0)
    work = _prefill(a, kernel, contexts)
    if a["WHOLE"]:
        return work
    partitions = _partitions(contexts, window)
    tiles = contexts.num_requests * a["NUM_KV_HEADS"] * -(-new // (a["BLOCK_M"] // a["GROUP"]))
    blocks = tiles * -(-contexts.keys(window) // a["BLOCK_N"])
    padded = 4 * blocks * a["BLOCK_N"] * a["BLOCK_M"] * a["BLOCK_H"]
    heads, head_dim = a["q"].shape[1:]
    states = _state_bytes(contexts, heads, head_dim, partitions)
    entries = max(kernel.programs, tiles * partitions)
    return dataclasses.replace(
        work, written=states or work.written, padded_flops=padded, entries=entries, trips=blocks
    )  # fmt: skip


def _exact_merge(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    heads, head_dim = a["NUM_HEADS"], a["HEAD_DIM"]
    if contexts.num_new > a["MAX_QUERY"]:
        return Work(0, 0)
    states = _state_bytes(contexts, heads, head_dim, _partitions(contexts, a["WINDOW"]))
    out = contexts.num_requests * contexts.num_new * heads * head_dim * a["out"].itemsize
    return Work(states, out if states else 0)


def _partitions(contexts: Contexts, window: int) -> int:
    """Of the keys that a request sees; they begin at multiples of ``PARTITION``."""
    from compiled_llm.ops.attention.triton_exact import PARTITION

    first = contexts.num_keys - contexts.keys(window)
    return -(-contexts.num_keys // PARTITION.value) - first // PARTITION.value


def _state_bytes(contexts: Contexts, heads: int, head_dim: int, partitions: int) -> int:
    """Of what is kept of each row between attention and merge: nothing where one task has all of its keys."""
    rows = contexts.num_requests * contexts.num_new * heads
    return rows * partitions * (head_dim + 2) * 4 if partitions > 1 else 0


def _rope(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    made = a["q"].nbytes + a["k"].nbytes
    return Work(made + a["cos_sin"].nbytes, made)


def _grouped(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Experts' products. Each token goes to experts at random: so many of them are read.

    With gates and ups a tile has the weights of both.
    """
    made = a["y"] if a.get("y") is not None else a["out"]
    experts, rows, factor = a["EXPERTS"], made.shape[0], 2 if a.get("ACTIVATION") else 1
    in_tile = factor if "weight" in a else 1  # a tile of codes is ``W x.T``, and has some outputs' gates and ups
    used = experts * (1 - (1 - 1 / experts) ** rows)
    weights = [a[name] for name in ("weight", "codes", "scales", "zeros", "bias") if a.get(name) is not None]
    of_weights = round(sum(tensor.nbytes for tensor in weights) * used / experts)
    flops = 2 * factor * rows * a["OUT"] * a["IN"]
    tiles = round(used + rows // a["BLOCK_M"]) * -(-a["OUT"] * factor // (a["BLOCK_N"] * in_tile))
    padded = 2 * in_tile * tiles * a["BLOCK_M"] * a["BLOCK_N"] * a["IN"]
    x = rows * a["IN"] * a["x"].itemsize
    read, shares = _inside(a, rows, tiles)
    of_weights += read
    programs, trips, bits = kernel.programs - a.get("before", 0), tiles * _trips(a), 8 * a["x"].itemsize
    return Work(of_weights + x, made.nbytes, flops, padded, bits, programs, trips, shares=shares)


def _grouped_sum(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """The last program counts its rows, some at a time, reads the places of their tokens, and all rows of these."""
    work = _grouped(a, kernel, contexts)
    if a.get("counters") is None:
        return work
    around = sum(a[name].nbytes for name in ("y", "places", "weights", "beside", "residual") if a[name] is not None)
    rounds = 3 * -(-min(a["BLOCK_M"], a["y"].shape[0]) // a["BLOCK_T"])
    return dataclasses.replace(
        work, read=work.read + around, written=work.written + a["out"].nbytes, round_trips=rounds,
        single=frozenset({"add_complete", "add_padding", "store_sums"}),
    )  # fmt: skip


def _route(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Each program chooses one expert of its tokens after the other."""
    read, written = (
        sum(a[name].nbytes for name in names if a.get(name) is not None)
        for names in (
            ("logits", "choice_bias", "expert_scale"),
            ("weights", "chosen", "users", "places", "tokens", "starts", "used"),
        )
    )
    return Work(read, written, shares={"choose": Share(kernel.programs, a["TOP_K"])})


def _routed_linear(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """The last program, or with many rows that of each of their tiles, reads a counter and all shares of the logits.

    It chooses one expert after the other.

    With many rows it reads another counter, who uses each expert, and twice what it stored for each token.
    """
    names = ("weight", "norm", "seen_norm", "bias", "choice_bias", "expert_scale")
    weights = [a[name] for name in names if a[name] is not None]
    read = a["x"].nbytes + sum(tensor.nbytes for tensor in weights) + a["shares"].nbytes
    stored = ("total", "shares", "normed", "out_weights", "places", "tokens", "starts", "chosen", "users", "first_rows")
    written = sum(a[name].nbytes for name in stored if a[name] is not None)
    read += 0 if a["delta"] is None else a["delta"].nbytes
    before = a["shrinking"] + a["expanding"]
    trips = (kernel.programs - before) * (a["SHARE"] // a["BLOCK_K"])
    flops, of_trip = 2 * a["x"].shape[0] * a["weight"].numel(), 2 * a["BLOCK"] * a["BLOCK_E"] * a["BLOCK_K"]
    rounds, bits = 2 if a["users"] is None else 6, 8 * a["weight"].itemsize
    chosen_by = 1 if a["users"] is None else -(-a["x"].shape[0] // a["BLOCK"])
    shares = {"choose": Share(chosen_by, a["TOP_K"], is_last=True)}
    if before:  # as ``_lora``
        num_rows = a["x"].shape[0]
        read += a["changed_by"].nbytes + min(num_rows, len(a["lora_a"])) * (
            a["lora_a"][0].nbytes + a["lora_b"][0].nbytes
        )
        written += a["delta"].nbytes
        slots, rounds = min(a["share_of_rows"], len(a["lora_a"])), rounds + 2
        shrinking = Share(a["shrinking"], slots * -(-a["SHRINK_IN"] // a["SHRINK_K"]))
        shares |= dict.fromkeys(("times_a", "shrink_rows"), shrinking)
        shares["expand_rows"] = Share(a["expanding"], slots * a["RANK"] // 8)
        shares["wait_for_programs"] = Share(kernel.programs - a["shrinking"])
    return Work(read, written, flops, trips * of_trip, bits, None, trips, rounds, shares)


def _trips(a: Arguments) -> int:
    """Of a tile of a product, over its inputs: in elements, or of quantised weights in bytes."""
    return -(-a["IN"] // a["BLOCK_K"]) if "BLOCK_K" in a else -(-a["ROW_BYTES"] // a["PART"])


def _inside(a: Arguments, rows: int, tiles: int) -> tuple[int, dict[str, Share]]:
    """Bytes of adapters, and their code, inside a product: every row has another one, of the largest rank."""
    if not a.get("before"):
        return 0, {}
    shrinking = Share(a["before"], a.get("share", 1) * -(-a["IN"] // a["SHRINK_K"]))
    return min(rows, len(a["lora_a"])) * (a["lora_a"][0].nbytes + a["lora_b"][0].nbytes), {
        **dict.fromkeys(("shrink", "shrink_rows", "times_a", "_ask_for_b"), shrinking),
        "changes_of": Share(tiles, a["RANK"] // 8),
        "wait_for_programs": Share(tiles),
    }


def _linear(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    rows, tiles = a["x"].shape[0], kernel.programs - a.get("before", 0)
    weights = [a[name] for name in ("weight", "codes", "scales", "zeros", "bias") if a.get(name) is not None]
    read = a["x"].nbytes + sum(tensor.nbytes for tensor in weights)
    trips = tiles * _trips(a)
    padded = 2 * tiles * a["BLOCK_M"] * a["BLOCK_N"] * a["IN"]
    flops = 2 * rows * a["OUT"] * a["IN"]
    return Work(read, a["out"].nbytes, flops, padded, 8 * a["x"].itemsize, None, trips)


def _head_linear(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Of single heads."""
    rows, tiles = a["out"].shape[0], kernel.programs - a["before"]
    trips, flops = tiles * _trips(a), 2 * rows * a["weight"].numel()
    padded = 2 * tiles * a["BLOCK_M"] * a["BLOCK_N"] * a["IN"]
    read = rows * a["HEADS"] * a["IN"] * a["x"].itemsize + a["weight"].nbytes
    of_adapters, shares = _inside(a, rows * a["HEADS"], tiles)
    return Work(read + of_adapters, a["out"].nbytes, flops, padded, 8 * a["x"].itemsize, None, trips, shares=shares)


def _surrounded_linear(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """With a gate, a tile has the weights of gates and ups; with a norm, rows are read before the main loop too.

    What its programs read again is in the cache. Int8 activations may be codes already.
    """
    from compiled_llm.ops.rowwise.triton_kernels import PLACES  # of a row, whose squares are added up at a time

    work = _linear(a, kernel, contexts)
    factor = 2 if a["GATED"] else 1
    around = ("norm", "beside", "residual", "x_scale", "x_scales", "x_sums")
    besides = sum(a[name].nbytes for name in around if a.get(name) is not None)
    bits = 8 if "x_scales" in a else work.bits
    tiles = kernel.programs - a.get("before", 0)
    passes = Share(tiles, -(-a["IN"] // PLACES.value))
    shares = {"inverse_rms_of_rows": passes, "scales_of_rows": passes}
    of_adapters, of_code = _inside(a, a["x"].shape[0], tiles)
    return dataclasses.replace(
        work, read=work.read + besides + of_adapters, flops=work.flops * factor, bits=bits, shares=shares | of_code
    )


def _exact_linear(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """With counters a program has a part of the inputs, and the last one of a tile adds the parts up."""
    work = _surrounded_linear(a, kernel, contexts)
    if a["counters"] is None:
        return work
    tiles = kernel.programs - a["before"]
    trips = tiles * -(-a["CHAIN"] // a["BLOCK_K"])
    partial = 4 * tiles * a["BLOCK_M"] * a["BLOCK_N"]
    return dataclasses.replace(
        work, read=work.read + partial, written=work.written + partial, padded_flops=work.padded_flops // a["CHAINS"],
        trips=trips, round_trips=2,
    )  # fmt: skip


def _lora(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Every row has an adapter of its own, of the largest rank, while there are slots.

    The main loop is that which expands. Programs wait for those that shrink, and these for what they read: four trips
    take as long as a round trip.
    """
    rows, used = a["num_rows"], min(a["num_rows"], len(a["a"]))
    around = (
        "x", "slots", "tokens", "bounds", "residual", "delta_norm", "norm", "norm_bias", "places", "expert_weights",
        "beside",
    )  # fmt: skip
    read = sum(a[name].nbytes for name in around if a[name] is not None) + used * (a["a"][0].nbytes + a["b"][0].nbytes)
    shrunk, y = 4 * rows * a["PARTS"] * a["RANK"], rows * a["b"].shape[1] * 16 * a["x"].itemsize
    following = kernel.programs - a["shrinking"] - a["expanding"]
    written = shrunk + y + a["out"].nbytes + (0 if a["total"] is None else a["total"].nbytes)
    slots = min(a["share"], used)  # that a program takes one after the other
    of_shrinking = slots * -(-a["IN"] // a["BLOCK_K"])
    shares = dict.fromkeys(("times_a", "shrink_rows"), Share(a["shrinking"], of_shrinking))
    shares["wait_for_programs"] = Share(kernel.programs - a["shrinking"])
    shares |= dict.fromkeys(
        ("norm_row", "layer_norm_row", "sum_of_norms_row", "gated_piece", "activated_piece", "store_sums"),
        Share(following),
    )
    return Work(
        read + shrunk + (2 if following else 1) * y, written, trips=a["expanding"] * slots * a["RANK"] // 8,
        round_trips=(2 if following else 1) + -(-of_shrinking // 4), shares=shares,
    )  # fmt: skip


def _norm(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    read, written = ("x", "delta", "weight"), ("total", "out")
    count = [sum(a[name].nbytes for name in names if a[name] is not None) for names in (read, written)]
    return Work(*count)


def _keep_rows(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Of a table or of activations: as many rows as it writes, whatever it may choose from."""
    written = a["out"].nbytes + a["num_rows"] * a["SIZE"] * a["x"].itemsize
    return Work(written + a["indices"].nbytes, written)


def _sum_of_ranks(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    """Through slots: one-shot a rank reads the slots of all, two-shot a section of each and the sums of all."""
    own, out, others = a["size"] * a["x"].itemsize, a["out"].nbytes, a["RANKS"] - 1
    trips, waits = kernel.programs * -(-a["run"] // a["BLOCK"]), {"wait_for_ranks": Share(kernel.programs)}
    if not a["TWO_SHOT"]:
        return Work(a["x"].nbytes + own, own + out, trips=trips, shares=waits, over_links=others * own)
    section = Share(kernel.programs, -(-a["run"] // a["RANKS"] // a["BLOCK"]))
    shares = {**waits, "sum_section": section, "gather_sections": section}
    read = (own + out) // a["RANKS"]  # of a rank: its section, and its sums
    return Work(
        a["x"].nbytes + read, own + out + out // a["RANKS"], trips=trips, shares=shares, over_links=others * read
    )  # fmt: skip


def _gather_of_ranks(a: Arguments, kernel: TritonKernel, contexts: Contexts) -> Work:
    own, trips = a["x"].nbytes, kernel.programs * -(-a["run"] // a["BLOCK"])
    waits = {"wait_for_ranks": Share(kernel.programs)}
    return Work(2 * own, own + a["out"].nbytes, trips=trips, shares=waits, over_links=(a["RANKS"] - 1) * own)


_RULES: dict[str, Callable[[Arguments, TritonKernel, Contexts], Work]] = {
    "write_kernel": _write,
    "split_kernel": _split,
    "decode_kernel": _decode,
    "alone_kernel": _alone,
    "prefill_kernel": _prefill,
    "exact_attention_kernel": _exact_attention,
    "exact_merge_kernel": _exact_merge,
    "rope_kernel": _rope,
    "head_linear_kernel": _head_linear,
    "norm_kernel": _norm,
    "lora_kernel": _lora,
    "keep_rows_kernel": _keep_rows,
    "rank_sum_kernel": _sum_of_ranks,
    "rank_gather_kernel": _gather_of_ranks,
    **LATENT_RULES,
    **STATE_RULES,
    "grouped_kernel": _grouped_sum,
    "grouped_sum_kernel": _grouped_sum,
    "routed_linear_kernel": _routed_linear,
    "route_kernel": _route,
    "route_few_kernel": _route,
    "exact_linear_kernel": _exact_linear,
    "quantized_linear_kernel": _surrounded_linear,
    "quantized_linear_a8_kernel": _surrounded_linear,
}
