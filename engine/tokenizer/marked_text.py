"""`MarkedTextEncoder`: token ids of a prompt in which the request's own names are marked."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from engine.tokenizer.encoding import encode_texts


class MarkedTextEncoder:
    """A tokenizer beside the model's own, for text with markers (see `ControlTokens`).

    It looks for added tokens as every tokenizer does, before it normalizes the text. A name that
    holds the marker isn't found. Then its normalizer drops the markers, and from there on nothing
    differs: what is left of the name is split and encoded as ordinary text. In two points it must
    differ from the model's tokenizer:

    - Control tokens are looked for only in the text as written, even those that the model's
      tokenizer also looks for behind the normalizer, where the markers are gone.
    - The model's own pieces hold no name that the model could make of ordinary text. That needs a
      copy of the vocabulary if a name is such a piece (Unigram, WordPiece, WordLevel; BPE's names
      hardly ever are).
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, control: Collection[str], marker: str
    ) -> None:
        """`backend` stays as it is. `control`: names of the control tokens.

        Raises `ValueError` or an error of `tokenizers` if there is no such encoder for `backend`.
        """
        self._marker = marker
        # A tokenizer made of a model shares it: a large vocabulary is in memory once.
        encoder = tokenizers.Tokenizer(_without_pieces(backend, control, marker))
        unmark = normalizers.Replace(marker, "")
        normalizer = backend.normalizer
        encoder.normalizer = (
            unmark if normalizer is None else normalizers.Sequence([unmark, normalizer])
        )
        if backend.pre_tokenizer is not None:
            encoder.pre_tokenizer = backend.pre_tokenizer
        added = sorted(backend.get_added_tokens_decoder().items())
        encoder.add_tokens([_copy_token(token, token.content in control) for _, token in added])
        self._encoder = encoder
        self._true_ids: dict[int, int] = {}
        """Ids of added tokens that are others here."""
        for true_id, token in added:
            found = encoder.token_to_id(token.content)
            if found == true_id:
                continue
            if found is None or encoder.model.id_to_token(found) is not None:
                raise ValueError(f"the added token {token.content!r} has no id of its own")
            self._true_ids[found] = true_id

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without its markers; no special tokens are added.

        Raises `RequestError` if the text isn't valid Unicode.
        """
        # Pre-tokenizers may treat the beginning of a text as such; it must not be a marker.
        (ids,) = encode_texts(self._encoder, [text.removeprefix(self._marker)], False)
        if not self._true_ids:
            return ids
        return [self._true_ids.get(token_id, token_id) for token_id in ids]


def _copy_token(token: AddedToken, is_control: bool) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not is_control,
        special=token.special,
    )


def _without_pieces(
    backend: tokenizers.Tokenizer, names: Collection[str], marker: str
) -> models.Model:
    """The model of `backend`, or a copy that can't make one of `names` from text.

    In the copy these pieces are renamed, so that the others keep their ids.
    """
    model: models.Model = backend.model
    pieces = {name for name in names if model.token_to_id(name) is not None}
    if isinstance(model, models.BPE):
        # A piece that BPE makes anywhere it also makes of the piece's own text; most names in BPE
        # vocabularies are there for their ids, and no merges lead to them.
        pieces = {name for name in pieces if _is_one_token(model, name)}
    if not pieces:
        return model
    state = json.loads(backend.to_str())["model"]
    vocab = state["vocab"]
    if isinstance(vocab, dict):
        state["vocab"] = {_rename(piece, pieces, marker): i for piece, i in vocab.items()}
    else:
        state["vocab"] = [[_rename(piece, pieces, marker), score] for piece, score in vocab]
    if isinstance(state.get("unk_token"), str):
        state["unk_token"] = _rename(state["unk_token"], pieces, marker)
    if "merges" in state:
        state["merges"] = [merge for merge in state["merges"] if not _touches(merge, pieces)]
    copy = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": state}))
    changed: models.Model = copy.model
    return changed


def _is_one_token(model: models.BPE, name: str) -> bool:
    return [token.id for token in model.tokenize(name)] == [model.token_to_id(name)]


def _rename(piece: str, pieces: Collection[str], marker: str) -> str:
    return marker + piece if piece in pieces else piece


def _touches(merge: Any, pieces: Collection[str]) -> bool:
    """Whether a merge, ["a", "b"] or "a b", takes or makes one of `pieces`."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in pieces or right in pieces or left + right in pieces
