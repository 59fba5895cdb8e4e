"""Whether captured decodes compute what the model's code computes.

A graph repeats kernels, not Python. Code of `transformers` that decides by values which only the
host knows would go on as it decided while it was captured.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from engine.worker.graphs.decode_graphs import DecodeGraphs
from engine.worker.graphs.sizes import nothing_but_padding
from engine.worker.model_runner import ModelRunner

_LENGTHS = (1, 5, 40, 3)
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BITS = 3e-2
"""Relative to the logits' norm: sums of another batch size may have another order."""


def repeats_the_model(graphs: DecodeGraphs, runner: ModelRunner) -> bool:
    """Whether the smallest graph gives the logits of eager steps, for tokens at some places.

    They stand in for the token of a line that is padding. Waits for the device.
    """
    tolerance = _TOLERANCE.get(runner.dtype, _TOLERANCE_16_BITS)
    size = min(graphs.sizes)
    for number, length in enumerate(_LENGTHS):
        batch = msgspec.structs.replace(
            nothing_but_padding(1),
            input_ids=np.array([(7 + 31 * number) % runner.config.model.vocab_size], np.int32),
            seq_lens=np.array([min(length, runner.config.max_model_len)], np.int32),
        )
        with runner.queue.stream():
            eager = runner.forward(runner.prepare(batch))
            captured = graphs.forward(graphs.prepare(batch, size), 1)
            if eager is None or captured is None:
                raise ValueError("only the last pipeline stage makes logits")
            wanted, found = eager.logits.float(), captured.float()
            if not bool((found - wanted).norm() <= tolerance * wanted.norm()):
                return False
    return True
