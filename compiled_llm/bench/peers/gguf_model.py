"""Writes a Qwen3 checkpoint as a GGUF file for llama.cpp, quantised as it is written.

    LLAMA_VENV/bin/python compiled_llm/bench/peers/gguf_model.py DIR FILE Q4_0 Q8_0

It runs in an environment of its own with ``gguf``, ``numpy`` and ``safetensors`` (docs/peers.md), and imports nothing
else. Matrices become blocks of 32 inputs with a float16 scale, which ``gguf`` rounds bit for bit as llama.cpp's own
tool does: Q8_0 has 8.5 bits a weight, Q4_0 has 4.5. Norms stay float32. A head that is tied to the embedding is
written once, as ``token_embd.weight``, and llama.cpp multiplies with it. There is no tokenizer: prompts are token ids.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = ("BF16", "Q8_0", "Q4_0")
LAYER_TENSORS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
MODEL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PIECE = 1 << 24  # weights that are quantised at a time


def gguf_name(name: str) -> str:
    """The name of a checkpoint's tensor in a GGUF file. ``ValueError`` if it has none."""
    module, _, kind = name.rpartition(".")
    if module in MODEL_TENSORS:
        return f"{MODEL_TENSORS[module]}.{kind}"
    parts = module.split(".", 3)
    if parts[:2] != ["model", "layers"] or len(parts) < 4 or parts[3] not in LAYER_TENSORS:
        raise ValueError(f"{name} must be a tensor of a dense Qwen3 model: others are not written")
    return f"blk.{parts[2]}.{LAYER_TENSORS[parts[3]]}.{kind}"


def stored_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each bfloat16 tensor of a checkpoint, as its 16 bits [...], mapped from the file."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_bytes))
        data = np.memmap(file, mode="r", offset=8 + header_bytes)
        for name, of in header.items():
            if name == "__metadata__":
                continue
            if of["dtype"] != "BF16":
                raise ValueError(f"{name} must be BF16, given {of['dtype']}: save the model as bfloat16")
            begin, end = of["data_offsets"]
            yield name, data[begin:end].view(np.uint16).reshape(of["shape"])


def as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encoded(bits: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of a matrix, a row at a time, [out_features, bytes of a row]."""
    if kind == "BF16":
        return np.ascontiguousarray(bits).view(np.uint8)
    rows = max(1, PIECE // bits.shape[1])
    of = gguf.GGMLQuantizationType[kind]
    return np.concatenate([gguf.quantize(as_float32(bits[at : at + rows]), of) for at in range(0, len(bits), rows)])


def write_gguf(directory: Path, file: Path, kind: str, head: str) -> None:
    """Matrices as ``kind``, the embedding and the head as ``head``."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ValueError(f"model_type must be qwen3, given {config['model_type']}: no other family is written")
    writer = gguf.GGUFWriter(file, "qwen3", use_temp_file=False)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    for name, bits in stored_tensors(directory):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), as_float32(bits))
            continue
        of = head if name in ("model.embed_tokens.weight", "lm_head.weight") else kind
        writer.add_tensor(gguf_name(name), encoded(bits, of), raw_dtype=gguf.GGMLQuantizationType[of])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    if len(sys.argv) != 5 or not {sys.argv[3], sys.argv[4]} <= set(TYPES):
        print(f"gguf_model.py takes DIR FILE TYPE HEAD, types one of {', '.join(TYPES)}; given {sys.argv[1:]}")
        return 2
    directory, file, kind, head = sys.argv[1:]
    write_gguf(Path(directory), Path(file), kind, head)
    return 0


if __name__ == "__main__":
    sys.exit(main())
