"""Paged attention: time, bandwidth and arithmetic rate, against what torch offers.

    python scripts/bench_attention.py                      # the grid of Qwen3-0.6B on the CPU
    python scripts/bench_attention.py --device cuda
    python scripts/bench_attention.py --decode 1x4096 32x1024 --prefill 512+1024

Three ways are timed in turn, round after round, so that they share whatever else the machine does:

    op       compiled_llm::paged_attention, the cache write included
    gather   the blocks of every request gathered into contiguous keys and values, then F.scaled_dot_product_attention
    sdpa     F.scaled_dot_product_attention on keys and values that are contiguous already (no paging at all)

A decode step reads every key and value once, so its yardstick is the memory: `GB/s` counts those bytes, `of limit` is
the share of what a plain sum over a large tensor reads in the same rounds. The caches of several layers are used in
turn, so that none is found in the processor's cache. A prefill's yardstick is arithmetic: `TFLOP/s` counts the two
products over the visible keys.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm import machine
from compiled_llm.ops import native, paged_attention

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYERS_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # the layers' caches together are at least this large


class Layers:
    """One step's input over the caches of several layers; each call of a method runs the next layer."""

    def __init__(self, args: argparse.Namespace, batch: int, query_len: int, context_len: int) -> None:
        self.batch, self.query_len, self.seq_len = batch, query_len, query_len + context_len
        heads, kv_heads, head_dim, block_size = args.heads, args.kv_heads, args.head_dim, args.block_size
        self.kv_heads, self.head_dim = kv_heads, head_dim
        options = {"dtype": DTYPES[args.dtype], "device": args.device}
        self.gqa = {"enable_gqa": heads != kv_heads}

        width = -(-self.seq_len // block_size)
        blocks = batch * width + 1
        self.cache_bytes = 2 * batch * self.seq_len * kv_heads * head_dim * options["dtype"].itemsize
        count = max(1, -(-LAYERS_BYTES[args.device] // self.cache_bytes))
        shape = (2, blocks, kv_heads, block_size, head_dim)
        if args.device == "cpu":  # as the engine allocates
            self.caches = [native.huge_zeros(shape, options["dtype"]).normal_() for _ in range(count)]
        else:
            self.caches = [torch.randn(shape, **options) for _ in range(count)]
        self.block_table = (torch.randperm(blocks - 1) + 1).int().view(batch, width).to(args.device)
        tokens = batch * query_len
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, **options).view(tokens, -1, head_dim)
        self.q, self.k, self.v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        positions = torch.arange(context_len, self.seq_len, device=args.device)
        blocks_of_tokens = self.block_table[:, positions // block_size].long()
        self.slot_mapping = (blocks_of_tokens * block_size + positions % block_size).flatten().int()
        self.query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device=args.device) * query_len
        self.seq_lens = torch.full((batch,), self.seq_len, dtype=torch.int32, device=args.device)
        visible = torch.arange(self.seq_len, device=args.device) <= positions[:, None]
        self.mask = None if query_len == 1 else visible
        self.contiguous: list[tuple[Tensor, Tensor]] = []
        self.layer = -1

    def next_layer(self) -> int:
        self.layer = (self.layer + 1) % len(self.caches)
        return self.layer

    def queries(self) -> Tensor:
        return self.q.unflatten(0, (self.batch, self.query_len)).transpose(1, 2)

    def gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = (
            cache[self.block_table.long()].transpose(1, 2).flatten(2, 3)[:, :, : self.seq_len]
            for cache in self.caches[layer]
        )
        return key, value

    def op(self) -> Tensor:
        k_cache, v_cache = self.caches[self.next_layer()]
        return paged_attention(
            self.q,
            self.k,
            self.v,
            k_cache,
            v_cache,
            self.slot_mapping,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            sm_scale=self.head_dim**-0.5,
            max_query_len=self.query_len,
        )

    def gather(self) -> Tensor:
        key, value = self.gathered(self.next_layer())
        return F.scaled_dot_product_attention(self.queries(), key, value, attn_mask=self.mask, **self.gqa)

    def sdpa(self) -> Tensor:
        if not self.contiguous:
            self.contiguous = [self.gathered(layer) for layer in range(len(self.caches))]
        key, value = self.contiguous[self.next_layer()]
        return F.scaled_dot_product_attention(self.queries(), key, value, attn_mask=self.mask, **self.gqa)

    def check(self) -> None:
        """The two results must agree, or the times mean nothing."""
        self.layer = -1
        ours = self.op().unflatten(0, (self.batch, self.query_len)).transpose(1, 2)
        self.layer = -1
        torch.testing.assert_close(ours, self.gather(), atol=2e-2, rtol=2e-2)


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min}


def replay(run: Callable[[], object], count: int) -> Callable[[], object]:
    """``count`` calls as one CUDA graph, as the engine runs them: Python's launches are not in the time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph.replay


def interleaved(
    runs: dict[str, Callable[[], object]], device: str, seconds: float, statistic: str, count: int
) -> dict[str, float]:
    """The statistic of the seconds of a call of each, all of them run in turn for about ``seconds``.

    On a GPU, ``count`` calls, one for each layer, are timed together.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    if device == "cuda":
        runs = {name: replay(run, count) for name, run in runs.items()}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, run in runs.items():
            times[name].append(timed(run, device) / (count if device == "cuda" else 1))
    return {name: STATISTICS[statistic](values) for name, values in times.items()}


def shape(text: str, separator: str) -> tuple[int, int]:
    first, second = text.split(separator)
    return int(first), int(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--decode", nargs="*", default=["1x512", "1x4096", "8x1024", "32x1024"], metavar="BATCHxCONTEXT"
    )
    parser.add_argument("--prefill", nargs="*", default=["128+0", "512+0", "512+1024"], metavar="TOKENS+CONTEXT")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of the table")
    parser.add_argument("--statistic", choices=STATISTICS, default="median", help="min on a machine that others use")
    parser.add_argument("--threads", type=int, help="of torch, on the CPU")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    facts = machine.describe(torch.device(args.device))
    cases = [("decode", *shape(text, "x")) for text in args.decode]
    cases += [("prefill", *shape(text, "+")) for text in args.prefill]
    large = native.huge_zeros([LAYERS_BYTES[args.device] // 4], torch.float32).fill_(1).to(args.device)
    print(
        f"{facts.get('gpu', facts['cpu'])}; "
        f"N={args.heads} K={args.kv_heads} H={args.head_dim} S={args.block_size} {args.dtype}"
    )
    header = f"{'':18}{'op':>12}{'gather':>12}{'sdpa':>12}{'GB/s':>9}{'of limit':>10}{'TFLOP/s':>9}{'gather/op':>11}"
    print(header)
    rows = []
    with torch.inference_mode():
        for kind, first, context_len in cases:
            batch, query_len = (first, 1) if kind == "decode" else (1, first)
            layers = Layers(args, batch, query_len, context_len - 1 if kind == "decode" else context_len)
            layers.check()
            runs = {"op": layers.op, "gather": layers.gather, "sdpa": layers.sdpa, "read": large.sum}
            times = interleaved(runs, args.device, args.seconds, args.statistic, len(layers.caches))
            limit = large.nbytes / times["read"]
            rate = layers.cache_bytes / times["op"]
            visible = query_len * context_len + query_len * (query_len + 1) / 2
            flops = 4 * args.heads * args.head_dim * (visible if kind == "prefill" else context_len * batch)
            name = f"{kind} {first}{'x' if kind == 'decode' else '+'}{context_len}"
            print(
                f"{name:18}{times['op'] * 1e6:9.1f} us{times['gather'] * 1e6:9.1f} us{times['sdpa'] * 1e6:9.1f} us"
                f"{rate / 1e9:9.1f}{rate / limit:10.0%}{flops / times['op'] / 1e12:9.3f}"
                f"{times['gather'] / times['op']:10.1f}x"
            )
            rows.append(
                {
                    "case": name,
                    "seconds": {key: times[key] for key in ("op", "gather", "sdpa")},
                    "gb_per_s": rate / 1e9,
                    "read_limit_gb_per_s": limit / 1e9,
                    "tflop_per_s": flops / times["op"] / 1e12,
                }
            )
    record = {
        "benchmark": "attention",
        "statistic": args.statistic,
        "model": {key: getattr(args, key) for key in ("heads", "kv_heads", "head_dim", "block_size", "dtype")},
        "rows": rows,
        "machine": facts,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
