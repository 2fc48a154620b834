"""Kinds of tokenizer.json as published models have them, trained on little text, and classes that name themselves
beside them.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

BOS, EOS, UNK, END, USER = "<s>", "</s>", "<unk>", "<|im_end|>", "<|user|>"
SPECIAL = [UNK, BOS, EOS, END, USER]
_CORPUS = [
    *(
        ["def f(x):\n    return x + 1\n\n\nclass A:\n    def g(self):\n        pass\n", "x =\n    1\n\ty = 2  # 34\n"]
        * 4
    ),
    *(["  two  spaces   three    four", "don't I'LL we've", "你好，世界 naïve café 3.14 12345"] * 4),
    *("the of and to in is it you that he was for on are with as his they be at one have this from " * 3,),
]
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LLAMA3 += r"\s*[\r\n]+|\s+(?!\S)|\s+"

TEXTS = [
    *("x =\n    1", " x", "  x", "x ", "\n", "\t\tif x:\n\t\t\tpass\n", "def f(x):\n        return x  # 12\n", "    "),
    *("Hello, world!", "don't I'LL", "12345 3.14", "1 234", "the  of   and", "a\r\nb\r\n", "a\n\n\nb", " \n x"),
    *("naïve café", "cafe\u0301 A\u030a", "ﬁ Ａ １", "\u1100\u1161\u11a8", "你好，世界", "こんにちは 12", "สวัสดีชาวโลก"),
    *("🚀🌍 👩‍💻", "नमस्ते दुनिया", "مرحبا", "\u00a0x\u3000y\u200b", "é" * 9, "\ufffd\x00\x7f", "▁x ▁ y", "Ġx <0x41>"),
    *(
        f"{USER}hi{END}\n",
        f"a{END} b",
        f" {END} {END}x",
        f"{EOS} x",
        f"x{EOS}  y",
        f"{BOS}x {UNK} y",
        "<|im_end|",
        "<s >",
    ),
    *("x" * 70, "Mixed ΑΒΓ абв 你 1२３ é\n\t🚀 end"),
]


def _byte_level(pre: pre_tokenizers.PreTokenizer, normalizer: Any = None) -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _sentencepiece(normalizer: Any, pre: Any, strips: bool = True) -> Backend:
    """BPE with tokens for bytes, whose spaces are ▁."""
    letters = sorted({"▁", *"".join(_CORPUS).replace(" ", "▁")} - {"\n", "\t"})
    spaces = ["▁" * count for count in range(2, 5)]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for token in (*letters, *spaces, "▁x", "re", "th", "the", "▁the"):
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "▁"), ("▁▁", "▁"), ("▁▁", "▁▁"), ("▁", "x"), ("r", "e"), ("t", "h"), ("th", "e"), ("▁", "the")]
    backend = Backend(models.BPE(vocab, merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return backend


def _unigram(pre: pre_tokenizers.PreTokenizer, decoder: Any, normalizer: Any) -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre, decoder
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=SPECIAL, unk_token=UNK, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _word_piece() -> Backend:
    backend = Backend(models.WordPiece(unk_token=UNK))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(_CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    return backend


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES])
_SPACES = normalizers.Replace(" ", "▁")
FILES: dict[str, Callable[[], Backend]] = {
    "gpt2": lambda: _byte_level(_GPT2),
    "smollm2": lambda: _byte_level(pre_tokenizers.Sequence([_DIGITS, _GPT2])),
    "prefix_space": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: _byte_level(_SPLIT),
    "qwen2": lambda: _byte_level(_SPLIT, normalizers.NFC()),
    "splits": lambda: _byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.Punctuation(), _BYTES]
        ),
        normalizers.NFKC(),
    ),
    "llama2": lambda: _sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), _SPACES]), None),
    "metaspace_first": lambda: _sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace_never": lambda: _sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="never"), strips=False),
    "gemma": lambda: _sentencepiece(_SPACES, pre_tokenizers.Split(" ", "merged_with_previous"), strips=False),
    "unigram": lambda: _unigram(
        pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace(), normalizers.NFKC()
    ),
    "word_piece": _word_piece,
}
# What tokenizer_config.json and config.json have: the class, and the model's type.
CLASSES: dict[str, tuple[str | None, str | None]] = {
    "general": ("PreTrainedTokenizerFast", None),
    "gpt2": ("GPT2Tokenizer", "llama"),
    "starcoder2": ("GPT2TokenizerFast", "starcoder2"),
    "llama": ("LlamaTokenizerFast", "llama"),
    "mistral": ("LlamaTokenizer", "mistral"),
    "qwen2": ("Qwen2Tokenizer", "qwen2"),
    "qwen3_5": ("PreTrainedTokenizerFast", "qwen3_5"),
    "of_model_qwen2": (None, "qwen2"),
    "gemma": ("GemmaTokenizer", "gemma2"),
    "neox": ("GPTNeoXTokenizer", "gpt_neox"),
    "codegen": ("CodeGenTokenizer", "phi3"),
    "t5": ("T5Tokenizer", None),
}


@functools.cache
def content_of(kind: str) -> str:
    """The tokenizer.json of a kind. Every second puts a begin-of-text token before a text."""
    backend = FILES[kind]()
    if list(FILES).index(kind) % 2:
        bos = backend.token_to_id(BOS)
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return backend.to_str()


def write_pair(directory: Path, kind: str, name: str = "general", **fields: Any) -> Path:
    """A directory with the file of a kind and the configs of a class. ``fields``: further ones of the tokenizer's."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(content_of(kind))
    of_class, model_type = CLASSES[name]
    config = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    config |= {} if of_class is None else {"tokenizer_class": of_class}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | fields))
    (directory / "config.json").write_text(json.dumps({} if model_type is None else {"model_type": model_type}))
    return directory
