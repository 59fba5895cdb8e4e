"""Process groups of one engine: tensor parallel collectives, pipeline hand-over of hidden states.

Ranks are ordered pipeline-major: `rank = pp_rank * tp_size + tp_rank`. Any failure of a peer
(closed connection, timeout) raises `RuntimeError` from the collective that met it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.errors import ConfigError

# Hidden states that may be on their way to the next stage. At least the number of micro-batches
# in flight, or a stage would wait for the next one's compute; each holds memory, because gloo
# reports a send as completed only to a caller that waits for it.
MAX_PENDING_SENDS = 16


@dataclass(frozen=True)
class ParallelState:
    """This process's place among the engine's workers, and its groups (None for groups of one)."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    tp_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None
    _sends: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque, repr=False)

    @classmethod
    def single(cls) -> ParallelState:
        """The state of an engine with one worker; needs no process group."""
        return cls(0, 1, 0, 1)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the tensor parallel group, in place."""
        if self.tp_size > 1:
            dist.all_reduce(tensor, group=self.tp_group)
        return tensor

    def all_gather_last_dim(self, tensor: Tensor) -> Tensor:
        """[N, d] on each tensor parallel rank -> [N, tp_size * d] on all, in rank order."""
        if self.tp_size == 1:
            return tensor
        rows, width = tensor.shape
        gathered = tensor.new_empty((self.tp_size * rows, width))
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.tp_group)
        parts = gathered.view(self.tp_size, rows, width).transpose(0, 1)
        return parts.reshape(rows, self.tp_size * width)

    def send_hidden(self, hidden: Tensor) -> None:
        """Start sending [T, hidden] to the next stage; returns before it has received it."""
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self.rank + self.tp_size, group=self.world_group)
        if work is None:
            raise RuntimeError("this process is not part of the pipeline's process group")
        # The tensor must live until the transfer is done.
        self._sends.append((work, hidden))
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()[0].wait()
        if len(self._sends) > MAX_PENDING_SENDS:
            self._sends.popleft()[0].wait()

    def recv_hidden(
        self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Receive [num_tokens, hidden_size] from the previous stage; blocks until it is there."""
        hidden = torch.empty((num_tokens, hidden_size), dtype=dtype, device=device)
        dist.recv(hidden, self.rank - self.tp_size, group=self.world_group)
        return hidden

    def destroy(self) -> None:
        """Leave the process groups. Every rank must have finished its last step."""
        self._sends.clear()
        if self.world_group is not None and dist.is_initialized():
            dist.destroy_process_group()


def open_store(host: str, port: int, *, master: bool) -> dist.TCPStore:  # type: ignore[name-defined]
    """The key-value store that ranks meet at; the `master` listens (port 0: any free one) and
    must be kept alive."""
    return dist.TCPStore(host, port, None, master, wait_for_workers=False)  # type: ignore[attr-defined]


def init_parallel(
    backend: str,
    init_method: str,
    rank: int,
    tp_size: int,
    pp_size: int,
    timeout_s: float,
    store: Store | None = None,
) -> ParallelState:
    """Join the engine's process group; blocks until all `tp_size * pp_size` ranks have.

    `backend` is "gloo" (CPU) or "nccl" (CUDA), `init_method` e.g. "tcp://host:port" (rank 0 opens
    the port), or "" with a `store` that somebody else holds.
    Raises `torch.distributed.DistError` if the others don't come within `timeout_s` seconds.
    """
    world_size = tp_size * pp_size
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is outside tp_size * pp_size = {world_size}.")
    pp_rank, tp_rank = divmod(rank, tp_size)
    if world_size == 1:
        return ParallelState.single()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        init_method=init_method or None,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    tp_group: dist.ProcessGroup | None = None
    # new_group is collective: every rank makes every stage's group, in the same order.
    for stage in range(pp_size if tp_size > 1 else 0):
        members = list(range(stage * tp_size, (stage + 1) * tp_size))
        group = dist.new_group(members, timeout=timeout)
        if stage == pp_rank:
            tp_group = group
    return ParallelState(tp_rank, tp_size, pp_rank, pp_size, tp_group, dist.group.WORLD)
