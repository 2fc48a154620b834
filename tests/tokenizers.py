"""Small tokenizers whose tokens may be a part of a character, in the two ways of those in use."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from compiled_llm.text.tokenizer import Tokenizer

END = "<|end|>"  # a special token


def byte_level(directory: Path, tokens: Sequence[str] = (), special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Of GPT-2's kind. ``tokens``: as its vocabulary spells them, with the ids from 0 on; then all bytes, then END.

    ``special_tokens``: after these.
    """
    names = dict.fromkeys([*tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    backend = Backend(models.BPE({name: index for index, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _saved(directory, backend, special_tokens)


def byte_fallback(directory: Path, tokens: Sequence[str] = ()) -> Tokenizer:
    """Of Llama's kind. ``tokens`` with the ids from 0 on; then <0x00> to <0xFF>, then END."""
    names = dict.fromkeys([*tokens, *(f"<0x{byte:02X}>" for byte in range(256))])
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _saved(directory, backend)


def _saved(directory: Path, backend: Backend, special_tokens: Sequence[str] = ()) -> Tokenizer:
    names = dict.fromkeys([END, *special_tokens])
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return Tokenizer(directory)
