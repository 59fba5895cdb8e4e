"""`Prompt`: what `LLM` takes as a prompt, and the lists that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import RequestError

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""A text, or token ids. An array or a tensor of two dimensions is several prompts."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Arrays and tensors of ids become lists. Raises `RequestError` on other things."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    try:
        given = [_plain(prompt) for prompt in prompts]
    except TypeError:
        raise RequestError(f"a prompt is a text or token ids, not {prompts!r}", "prompt") from None
    if given and all(type(token) is int for token in given):
        return [given]
    for prompt in given:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, Sequence) and all(type(token) is int for token in prompt)
        ):
            raise RequestError("a prompt is a text or whole numbers, its token ids", "prompt")
    return given


def _plain(value: Any) -> Any:
    """Arrays of numpy and tensors of torch as lists or numbers, and what holds them too."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
