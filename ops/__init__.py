"""Custom ops of the engine, registered with ``torch.library`` under the namespace ``compiled_llm``.

Import this package as ``compiled_llm.ops``, never as ``ops``: two modules would register every op twice.
Only torch is needed to import it. Triton is imported when a kernel first runs on a GPU, and the C++ kernels are built
when one first runs on a CPU. What the C++ kernels share is in ``cpu/``.
"""

from compiled_llm.ops.attention.arguments import AttentionKind, Keys, Turn
from compiled_llm.ops.attention.decode_attention import decode_attention, rotary_decode_attention
from compiled_llm.ops.attention.decode_plan import DecodePlan, decode_plan
from compiled_llm.ops.attention.latent_attention import latent_attention
from compiled_llm.ops.attention.move_keys import move_keys
from compiled_llm.ops.attention.paged_attention import paged_attention, paged_attention_reference
from compiled_llm.ops.attention.rotary_attention import rotary_attention
from compiled_llm.ops.attention.rotary_latent_attention import (
    rotary_latent_attention,
    rotary_latent_decode_attention,
)
from compiled_llm.ops.fetch import await_fetched, fetch
from compiled_llm.ops.linear.exact_linear import exact_linear
from compiled_llm.ops.linear.head_linear import head_linear
from compiled_llm.ops.linear.lora import Following, LoraRows, LoraWeights, add_lora, lora_followed, slots_of_rows
from compiled_llm.ops.linear.own_head import own_head
from compiled_llm.ops.linear.packed_linear import TILE, empty_packed, pack_rows, pack_weight, packed_linear, unpack_rows
from compiled_llm.ops.linear.quantized_linear import fused_quantized_linear, grouped_quantized_linear, quantized_linear
from compiled_llm.ops.linear.quantized_linear_a8 import (
    fused_quantized_linear_a8,
    grouped_quantized_linear_a8,
    quantized_linear_a8,
)
from compiled_llm.ops.moe.fused_quantized_experts import gated_quantized_experts, summed_quantized_experts
from compiled_llm.ops.moe.grouped_linear import (
    grouped_gated_linear,
    grouped_linear,
    grouped_linear_sum,
    grouped_packed_linear,
)
from compiled_llm.ops.moe.routed_linear import routed_linear
from compiled_llm.ops.moe.routing import expert_rows, route, routed_rows, weighted_sum, weighted_sum_added
from compiled_llm.ops.parallel.rank_group import RankGroup
from compiled_llm.ops.parallel.reductions import all_gather, all_reduce, join_parts
from compiled_llm.ops.recurrent.gated_delta_rule import gated_delta_rule
from compiled_llm.ops.recurrent.mamba2_scan import mamba2_scan
from compiled_llm.ops.recurrent.short_convolution import short_convolution
from compiled_llm.ops.recurrent.state_rows import StateRows
from compiled_llm.ops.rowwise.rowwise import (
    activation,
    add_layer_norm,
    add_rms_norm,
    clamped_swiglu,
    gated_activation,
    gated_rms_norm,
    keep_rows,
    layer_norm,
    log_sum_exp,
    log_sum_exp_of_ranks,
    norm_of_sum,
    qk_norm,
    rms_norm,
    rope,
    rows_at,
    scaled_sum,
    sigmoid_gated,
    soft_cap,
    sum_of_norms,
    table_rows,
    write_slots,
)
from compiled_llm.ops.sampling.rank_sampling import sample_tokens_of_ranks
from compiled_llm.ops.sampling.token_sampling import greedy_tokens, keep_greedy_tokens, sample_tokens

__all__ = [
    "TILE", "AttentionKind", "DecodePlan", "Following", "Keys", "LoraRows", "LoraWeights", "RankGroup", "StateRows",
    "Turn", "activation", "add_layer_norm", "add_lora", "add_rms_norm", "all_gather", "all_reduce",
    "await_fetched", "clamped_swiglu", "decode_attention", "decode_plan", "empty_packed", "exact_linear", "expert_rows",
    "fetch", "fused_quantized_linear", "fused_quantized_linear_a8", "gated_activation", "gated_delta_rule",
    "gated_quantized_experts", "gated_rms_norm", "greedy_tokens", "grouped_gated_linear", "grouped_linear",
    "grouped_linear_sum", "grouped_packed_linear", "grouped_quantized_linear", "grouped_quantized_linear_a8",
    "head_linear", "join_parts", "keep_greedy_tokens", "keep_rows", "latent_attention", "layer_norm", "log_sum_exp",
    "log_sum_exp_of_ranks", "lora_followed", "mamba2_scan", "move_keys", "norm_of_sum", "own_head", "pack_rows",
    "pack_weight", "packed_linear", "paged_attention", "paged_attention_reference", "qk_norm", "quantized_linear",
    "quantized_linear_a8", "rms_norm", "rope", "rotary_attention", "rotary_decode_attention",
    "rotary_latent_attention", "rotary_latent_decode_attention", "route", "routed_linear", "routed_rows", "rows_at",
    "sample_tokens", "sample_tokens_of_ranks", "scaled_sum", "short_convolution", "sigmoid_gated", "slots_of_rows",
    "soft_cap", "sum_of_norms", "summed_quantized_experts", "table_rows", "unpack_rows", "weighted_sum",
    "weighted_sum_added", "write_slots",
]  # fmt: skip
