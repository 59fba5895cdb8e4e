"""How byte-level tokenizers split texts before they merge, by the name that GGUF files give it.

The patterns are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(ending: str) -> str:
    """Words whose capitals come first."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"


_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_TEKKEN = _words("") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_GPT4O = _words(f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES


class Split(NamedTuple):
    """What comes before the merges, and what the files of this kind leave out."""

    pattern: str = ""
    """"": that of GPT-2."""
    single_digits: bool = False
    is_composed: bool = False
    """Texts are brought into the form NFC first."""
    ignore_merges: bool = False
    """A word that is a token isn't merged."""
    add_bos: bool = False
    """Unless the file says otherwise, texts begin with the bos token."""

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.is_composed else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern:
            steps = [
                pre_tokenizers.Split(Regex(self.pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
            return pre_tokenizers.Sequence(steps)
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self.single_digits:
            return bytes_
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])


_LLAMA3_SPLIT = Split(_LLAMA3, ignore_merges=True, add_bos=True)

SPLITS = {
    "gpt-2": Split(),
    "phi-2": Split(),
    "mpt": Split(),
    "olmo": Split(),
    "exaone4": Split(),
    "smollm": Split(single_digits=True),
    "starcoder": Split(single_digits=True),
    "refact": Split(single_digits=True),
    "codeshell": Split(single_digits=True),
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "dbrx": Split(_LLAMA3),
    "smaug-bpe": Split(_LLAMA3),
    "qwen2": Split(_QWEN2, is_composed=True),
    "deepseek-r1-qwen": Split(_QWEN2, is_composed=True),
    "tekken": Split(_TEKKEN, ignore_merges=True, add_bos=True),
    "gpt-4o": Split(_GPT4O),
    "llama4": Split(_GPT4O),
}
