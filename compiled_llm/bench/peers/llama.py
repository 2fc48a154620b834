"""llama.cpp for ``worker.py``, through the C interface that llama-cpp-python wraps. It runs in its environment.

Requests are batched continuously, as llama.cpp's server does it: each call computes one token of every request that
decodes, and fills up to ``n_batch`` tokens with prompts, in the order of the requests.
"""

import ctypes
import sys
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}


class LlamaCpp:
    """``options``: ``threads``, ``contexts`` ([sequences, tokens of each]), ``n_batch``, ``n_ubatch``, ``flash_attn``,
    ``kv_unified`` and ``kv_type``.

    Requests run in the first context in which they fit: its KV cache is of a fixed size for each sequence, and 32 times
    the longest prompt of all would not fit into memory. ``ValueError`` if they fit into none.
    """

    packages = ("llama-cpp-python", "gguf", "numpy")

    def __init__(self, file: str, options: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        print(llama_cpp.llama_print_system_info().decode(), file=sys.stderr)
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp did not load {file}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._n_batch, self._sizes = options["n_batch"], options["contexts"]
        self._contexts = [self._context(sequences, tokens, options) for sequences, tokens in self._sizes]

    def _context(self, sequences: int, tokens: int, options: dict[str, Any]) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * tokens, sequences
        params.n_batch, params.n_ubatch = options["n_batch"], options["n_ubatch"]
        params.n_threads = params.n_threads_batch = options["threads"]
        params.flash_attn_type, params.kv_unified = int(options["flash_attn"]), options["kv_unified"]
        params.type_k = params.type_v = TYPES[options["kv_type"]]
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp made no context of {sequences} sequences of {tokens} tokens")
        return context

    def run(self, requests: list[tuple[list[int], int]], run: Any) -> None:
        longest = max(len(prompt) + output_len for prompt, output_len in requests)
        fits = [len(requests) <= sequences and longest <= tokens for sequences, tokens in self._sizes]
        if not any(fits):
            raise ValueError(f"contexts must hold {len(requests)} sequences of {longest} tokens, given {self._sizes}")
        context = self._contexts[fits.index(True)]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)
        try:
            self._serve(context, batch, requests, run)
        finally:
            llama_cpp.llama_batch_free(batch)

    def _serve(self, context: Any, batch: Any, requests: list[tuple[list[int], int]], run: Any) -> None:
        texts = [list(prompt) for prompt, _ in requests]  # what is to be in the KV cache
        computed = [0] * len(requests)
        while True:
            batch.n_tokens = 0
            chosen: list[tuple[int, int]] = []  # request, and the row of the batch that gives its next token
            open_ = [i for i, (_, output_len) in enumerate(requests) if run.output_len(i) < output_len]
            if not open_:
                return
            for index in sorted(open_, key=lambda i: run.output_len(i) == 0):  # decodes first
                count = min(len(texts[index]) - computed[index], self._n_batch - batch.n_tokens)
                for at in range(computed[index], computed[index] + count):
                    row = batch.n_tokens
                    batch.token[row], batch.pos[row] = texts[index][at], at
                    batch.n_seq_id[row], batch.seq_id[row][0] = 1, index
                    batch.logits[row] = at + 1 == len(texts[index])
                    batch.n_tokens += 1
                computed[index] += count
                if count and computed[index] == len(texts[index]):
                    chosen.append((index, batch.n_tokens - 1))
            status = llama_cpp.llama_decode(context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode gave {status}")
            for index, row in chosen:
                logits = llama_cpp.llama_get_logits_ith(context, row)
                address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
                token = int(np.ctypeslib.as_array(address, (self._vocab_size,)).argmax())
                texts[index].append(token)
                run.add(index, [token])
