"""Token embedding and output head, split over the tensor parallel group by vocabulary.

The vocabulary is padded to a multiple of tp_size, so that any size can be split.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.distributed import ParallelState
from engine.layers.embedding_table import EmbeddingTable, RowTable
from engine.layers.linear_kernel import LinearKernel
from engine.layers.weight_format import MatrixSlice
from engine.layers.weights import WeightSource

logger = logging.getLogger(__name__)


class VocabShard:
    """Rows [start, end) of the padded vocabulary that one rank owns."""

    def __init__(self, vocab_size: int, parallel: ParallelState) -> None:
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // parallel.tp_size)
        self.start = parallel.tp_rank * self.rows
        self.end = self.start + self.rows

    def load(self, source: WeightSource, name: str, hidden_size: int) -> Tensor:
        """This rank's rows of the tensor `name`, [rows, hidden_size], with zeros in the padding."""
        start = min(self.start, self.vocab_size)
        count = min(self.end, self.vocab_size) - start
        if count == 0:
            return torch.zeros((self.rows, hidden_size), dtype=source.dtype, device=source.device)
        weight = source.get(name, (self.vocab_size, hidden_size), dim=0, start=start, count=count)
        return F.pad(weight, (0, 0, 0, self.rows - count)) if count < self.rows else weight

    def keep(self, source: WeightSource, name: str, hidden_size: int) -> LinearKernel | None:
        """The kernel of the same rows, as the checkpoint has them quantized; None: `load` them."""
        start = min(self.start, self.vocab_size)
        count = min(self.end, self.vocab_size) - start
        matrix = name.removesuffix(".weight")
        part = MatrixSlice(matrix, self.vocab_size, hidden_size, 0, start, count)
        return source.format.keep(source, [part], None, self.rows) if count else None


class VocabParallelEmbedding:
    """Token ids -> embeddings, the same on every rank."""

    table: EmbeddingTable

    def __init__(self, vocab_size: int, hidden_size: int, parallel: ParallelState) -> None:
        self.hidden_size = hidden_size
        self.parallel = parallel
        self.shard = VocabShard(vocab_size, parallel)

    def load(self, source: WeightSource, name: str) -> None:
        kept = self.shard.keep(source, name, self.hidden_size)
        if kept is not None:
            self.table = source.format.table(kept, source.dtype)
        else:
            self.table = RowTable(self.shard.load(source, name, self.hidden_size))

    def load_tied(
        self, source: WeightSource, name: str, head: ParallelLMHead, head_name: str
    ) -> None:
        """The same, for a `head` that multiplies by this matrix.

        Where the checkpoint has another matrix as `head_name`, the head takes that one, whatever
        config.json says: so does transformers.
        """
        kept = self.shard.keep(source, name, self.hidden_size) if head_name == name else None
        if kept is not None:
            self.table, head.kernel = source.format.table(kept, source.dtype), kept
            return
        weight = self.shard.load(source, name, self.hidden_size)
        if head_name != name:
            own = self.shard.load(source, head_name, self.hidden_size)
            if not torch.equal(weight, own):
                logger.warning(
                    "config.json ties the output head to the embedding, but %s differs from %s: "
                    "they are not tied",
                    head_name,
                    name,
                )
                self.table = RowTable(weight)
                head.kernel = source.format.linear(own, None)
                return
            del own
        self.table, head.kernel = source.format.tied(weight)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]"""
        if self.parallel.tp_size == 1:
            return self.table(input_ids)
        local = input_ids - self.shard.start
        outside = (local < 0) | (local >= self.shard.rows)
        embedded = self.table(local.masked_fill_(outside, 0))
        return self.parallel.all_reduce(embedded.masked_fill_(outside.unsqueeze(-1), 0))


class ParallelLMHead:
    """Hidden states -> logits over the whole vocabulary, gathered on every rank."""

    kernel: LinearKernel

    def __init__(self, vocab_size: int, hidden_size: int, parallel: ParallelState) -> None:
        self.hidden_size = hidden_size
        self.parallel = parallel
        self.shard = VocabShard(vocab_size, parallel)

    def load(self, source: WeightSource, name: str) -> None:
        kept = self.shard.keep(source, name, self.hidden_size)
        if kept is None:
            kept = source.format.linear(self.shard.load(source, name, self.hidden_size), None)
        self.kernel = kept

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, vocab_size], of the model's type or float32. Collective when
        tp_size > 1."""
        logits = self.parallel.all_gather_last_dim(self.kernel.logits(hidden))
        return logits[:, : self.shard.vocab_size]
