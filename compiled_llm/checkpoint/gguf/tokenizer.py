"""``tokenizer.json`` and ``tokenizer_config.json`` of the vocabulary in a GGUF file.

A file names its kind of tokenizer, "gpt2" (byte-level BPE) or "llama" (SentencePiece's BPE, whose merges follow from
scores), and for the first how texts are split before, ``tokenizer.ggml.pre``: github.com/ggml-org/llama.cpp,
src/llama-vocab.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from compiled_llm.checkpoint.stored_tensors import CheckpointError

# Kinds of tokens, tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6

# -- How texts are split, by tokenizer.ggml.pre

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_OF_GPT4O = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(after: str, digits: str) -> str:
    """Words that end where lower case does."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    return f"{begin}{_UPPER}*{_LOWER}+{after}|{begin}{_UPPER}+{_LOWER}*{after}|{digits}|{_REST_OF_GPT4O}"


_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


class _Split(NamedTuple):
    """Regular expressions, each applied to what those before left together.

    Attributes:
        whole: a word that is a token is that token, whatever the merges are.
        adds_bos: unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    adds_bos: bool = False


_DIGITS_FIRST = _Split((r"\p{N}", _GPT2))
_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WAYS: tuple[tuple[_Split, str], ...] = (
    (_Split((_GPT2,)), "gpt-2 phi-2 mpt olmo jais exaone4 a.x-4.0 mellum trillion granite-docling gigachat"),
    (_DIGITS_FIRST, "starcoder refact command-r smollm codeshell exaone minerva-7b"),
    (_Split((_LLAMA3,), True, True), "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2"),
    (_Split((_LLAMA3,), True), "glm4 glm5"),
    (_Split((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (_Split((_QWEN2,)), "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez grok-2 solar-open"),
    (_Split((_QWEN35,)), "qwen35"),
    (_Split((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)), "seed-coder"),
    (_Split((_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)), "gpt-4o llama4 kanana2 minimax-m2"),
    (_Split((_cased("", r"\p{N}"),), True, True), "tekken"),
    (_Split((r"\p{N}{1,3}", _JAPANESE, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense joyai-llm"),
    (_Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")), "deepseek-coder"),
    (_Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (_Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
)
_SPLITS = {name: split for split, names in _WAYS for name in names.split()}

# -- Tokens that end an output, whatever the file says of its end-of-text token

_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
}  # fmt: skip
_ENDS |= {"<|end_of_text|>", "<turn|>", "<｜end▁of▁sentence｜>", "<EOT>", "[EOT]", "[EOS]", "[e~["}


class Vocabulary(NamedTuple):
    """What metadata say of a tokenizer.

    Attributes:
        tokens: by id, each another text.
        kinds: of the tokens.
        metadata: all of the file.
        where: file, for messages.
    """

    tokens: list[str]
    kinds: list[int]
    metadata: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def token(self, key: str) -> str | None:
        """The token whose id is the value of ``key``."""
        number = self.get(f"{key}_token_id")
        return self.tokens[number] if number is not None and 0 <= number < len(self.tokens) else None

    def ids(self, *kinds: int) -> list[int]:
        return [i for i, kind in enumerate(self.kinds) if kind in kinds]


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> Vocabulary | None:
    """The vocabulary; None where the file has none.

    Raises:
        ValueError: it is of a kind that is not supported, or its parts have not the same length.
    """
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    if kind not in ("gpt2", "llama", "gemma4"):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.model must be 'gpt2' or 'llama', found {kind!r:.100}. Give the tokenizer's own "
            "directory, --tokenizer DIR"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens must be a list of strings")
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = [_NORMAL] * len(tokens) if kinds is None else [int(one) for one in kinds]
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{where}: has {len(tokens)} tokens, and the kinds of {len(kinds)}")
    return Vocabulary(_distinct(tokens), kinds, metadata, where)


def _distinct(tokens: Sequence[str]) -> list[str]:
    """``tokens``, those that were there before with their number."""
    seen: set[str] = set()
    found = []
    for i, token in enumerate(tokens):
        found.append(f"{token}#{i}" if token in seen else token)
        seen.add(token)
    return found


def end_of_text_ids(vocabulary: Vocabulary | None) -> list[int]:
    """The tokens that end an output."""
    if vocabulary is None:
        return []
    named = [vocabulary.get(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    special = vocabulary.ids(_CONTROL, _USER)
    return sorted({int(i) for i in named if i is not None} | {i for i in special if vocabulary.tokens[i] in _ENDS})


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """``tokenizer_config.json``."""
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, Any] = {name: vocabulary.token(key) for key, name in named.items() if vocabulary.token(key)}
    templates = {
        key.removeprefix("tokenizer.chat_template").lstrip("."): text
        for key, text in vocabulary.metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(text, str)
    }
    if len(templates) > 1:
        config["chat_template"] = [{"name": name or "default", "template": text} for name, text in templates.items()]
    elif templates:
        (config["chat_template"],) = templates.values()
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}


def tokenizer_json(vocabulary: Vocabulary) -> str:
    """``tokenizer.json``.

    Raises:
        ValueError: the merges are not of tokens, or the way of splitting is not known.
    """
    from tokenizers import AddedToken

    is_byte_level = vocabulary.get("model") == "gpt2"
    made = _byte_level(vocabulary) if is_byte_level else _sentence_piece(vocabulary)
    adds_bos = _split(vocabulary).adds_bos if is_byte_level else True
    _frame(vocabulary, made, bool(vocabulary.get("add_bos_token", adds_bos)))
    for kinds, special in (((_CONTROL, _UNKNOWN), True), ((_USER,), False)):
        tokens = [vocabulary.tokens[i] for i in vocabulary.ids(*kinds)]
        made.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens if token])
    return made.to_str()


def _frame(vocabulary: Vocabulary, made: Any, adds_bos: bool) -> None:
    """The tokens that are put before and behind a text."""
    from tokenizers.processors import Sequence as InTurn
    from tokenizers.processors import TemplateProcessing

    bos = vocabulary.token("bos") if adds_bos else None
    eos = vocabulary.token("eos") if vocabulary.get("add_eos_token", False) else None
    if bos is None and eos is None:
        return
    numbers = {token: vocabulary.tokens.index(token) for token in (bos, eos) if token}
    single = " ".join([f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos))
    template = TemplateProcessing(single=single.split(" "), special_tokens=list(numbers.items()))
    made.post_processor = InTurn([made.post_processor, template]) if made.post_processor else template


def _split(vocabulary: Vocabulary) -> _Split:
    name = vocabulary.get("pre", "default")
    found = _SPLITS.get(name)
    if found is None:
        raise CheckpointError(
            f"{vocabulary.where}: tokenizer.ggml.pre must be one of {', '.join(sorted(_SPLITS))}, found {name!r:.100}. "
            "Give the tokenizer's own directory, --tokenizer DIR"
        )
    return found


def _byte_level(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    split = _split(vocabulary)
    merges = [_pair(merge) for merge in vocabulary.get("merges", [])]
    numbers = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        made = Tokenizer(models.BPE(numbers, merges, ignore_merges=split.whole, fuse_unk=False))
    except Exception as error:  # the library's own kind
        raise CheckpointError(f"{vocabulary.where}: tokenizer.ggml.merges: {error!s:.300}") from error
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    bytes_of = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(vocabulary.get("add_space_prefix", False)), use_regex=False
    )
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def _pair(merge: str) -> tuple[str, str]:
    # The first character may be a space itself.
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentence_piece(vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    numbers = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = vocabulary.get("merges")
    pairs = _merges_of_scores(vocabulary, numbers) if merges is None else [_pair(merge) for merge in merges]
    unknown = vocabulary.token("unknown")
    made = Tokenizer(models.BPE(numbers, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(vocabulary.get("add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if has_prefix else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return made


def _merges_of_scores(vocabulary: Vocabulary, numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, that of the highest score first: the order in which SentencePiece joins.

    Kudo and Richardson, 2018 (arXiv:1808.06226).
    """
    scores = vocabulary.get("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{vocabulary.where}: tokenizer.ggml.scores must have a number for each token")
    usable = {token: numbers[token] for token in (vocabulary.tokens[i] for i in vocabulary.ids(_NORMAL, _USER))}
    found = []
    for token, number in usable.items():
        pairs = []
        for i in range(1, len(token)):
            left = usable.get(token[:i])
            if left is not None and (right := usable.get(token[i:])) is not None:
                pairs.append((left, right, i))
        if pairs:
            found.append((-float(scores[number]), number, token, sorted(pairs)))
    found.sort()
    return [(token[:i], token[i:]) for _, _, token, pairs in found for _, _, i in pairs]
