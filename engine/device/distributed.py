"""Process groups of one engine: tensor parallel collectives, pipeline hand-over of hidden states.

gloo (CPU): the calls block until the data is there. If a peer is lost (closed connection, timeout),
the call that needs it raises `RuntimeError`. NCCL (CUDA): the calls only order streams, and the
host never waits. Kernels that need a lost peer wait until the group's timeout, so the process that
supervises the ranks has to end them all.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.errors import ConfigError

# Hidden states that may be on their way to the next stage. This must be at least the number of
# micro-batches in flight, or a stage would wait for the next one's compute. Each holds memory:
# gloo reports a send as completed only to a caller that waits for it.
MAX_PENDING_SENDS = 16
_SIOCGIFADDR = 0x8915  # Linux, netdevice(7)


@dataclass
class ParallelState:
    """This process's place among the engine's workers, and its groups (None for groups of one).

    Ranks are ordered pipeline-major: `rank = pp_rank * tp_size + tp_rank`.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    tp_group: dist.ProcessGroup | None = None
    world_group: dist.ProcessGroup | None = None
    recv_group: dist.ProcessGroup | None = None
    """Shared with the previous stage."""
    send_group: dist.ProcessGroup | None = None
    """Shared with the next stage."""
    recv_stream: torch.cuda.Stream | None = None
    """The stream on which hidden states arrive; CUDA only."""
    pending_sends: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque, repr=False)
    ep_size: int | None = None
    """Groups of tensor parallel ranks that divide experts; None: as many as can be."""

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

    def min_over_ranks(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all the engine's ranks. Blocks; for the start only."""
        if self.tp_size * self.pp_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.world_group)
        return int(tensor.item())

    def check_equal(self, value: int) -> None:
        """Raise `RuntimeError` unless all ranks of the tensor parallel group call with the same
        `value`, below 2^62. Blocks."""
        if self.tp_size == 1:
            return
        tensor = torch.tensor([value, -value], dtype=torch.int64)
        if dist.get_backend(self.tp_group) == "nccl":
            tensor = tensor.cuda()
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.tp_group)
        largest, smallest = tensor.tolist()
        if largest != -smallest:
            raise RuntimeError("tensor parallel ranks disagree on a step's drafts")

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
        """Start sending [T, hidden] to the next stage; returns before it has received it.

        NCCL sends once the current stream has computed the tensor.
        """
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self.rank + self.tp_size, group=self.send_group)
        if work is None:
            raise RuntimeError("this process is not part of the pipeline's process group")
        # The tensor must live until the transfer is done.
        self.pending_sends.append((work, hidden))
        while self.pending_sends and self.pending_sends[0][0].is_completed():
            self.pending_sends.popleft()[0].wait()
        if len(self.pending_sends) > MAX_PENDING_SENDS:
            self.pending_sends.popleft()[0].wait()

    def recv_hidden(
        self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Receive [num_tokens, hidden_size] from the previous stage.

        gloo blocks until it is there; NCCL makes the current stream wait for it. With NCCL it
        arrives on a stream of its own. On the current stream the transfer, and with it the previous
        stage that sends, would wait for this stage's earlier steps.
        """
        shape, source = (num_tokens, hidden_size), self.rank - self.tp_size
        if self.recv_stream is None:
            hidden = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(hidden, source, group=self.recv_group)
            return hidden
        with torch.cuda.stream(self.recv_stream):
            hidden = torch.empty(shape, dtype=dtype, device=device)
            work = dist.irecv(hidden, source, group=self.recv_group)
            if work is None:
                raise RuntimeError("this process is not part of the pipeline's process group")
            work.wait()
        current = torch.cuda.current_stream(device)
        current.wait_stream(self.recv_stream)
        # Its memory belongs to the other stream, which must not reuse it before this one is done.
        hidden.record_stream(current)
        return hidden

    def destroy(self) -> None:
        """Leave the process groups. Every rank must have finished its last step.

        gloo's threads have ended when this returns. One that still holds a tensor when the
        interpreter ends would abort the process.
        """
        self.pending_sends.clear()
        if self.world_group is not None and dist.is_initialized():
            dist.destroy_process_group()
        # A group's threads end with the last reference to it.
        self.tp_group = self.world_group = self.recv_group = self.send_group = None

    def abandon(self) -> None:
        """Leave the process groups after a failure, without the other ranks.

        With NCCL this does nothing: what waits for a lost peer ends with the process.
        """
        if self.world_group is not None and dist.get_backend(self.world_group) == "gloo":
            self.destroy()


def open_store(host: str, port: int, *, master: bool) -> dist.TCPStore:  # type: ignore[name-defined]
    """The key-value store through which ranks find each other. The `master` listens (port 0: any
    free port); keep it alive."""
    return dist.TCPStore(host, port, None, master, wait_for_workers=False)  # type: ignore[attr-defined]


def let_gloo_use(address: str) -> None:
    """Make gloo connect over the interface that has this IPv4 address, unless the environment names
    one. By itself gloo takes the address of the host's name, and loopback where that has none, so
    that ranks on other hosts can't connect."""
    name = interface_of(address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_of(address: str) -> str:
    """The network interface of this machine with an IPv4 address; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def init_parallel(
    backend: str,
    init_method: str,
    rank: int,
    tp_size: int,
    pp_size: int,
    timeout_s: float,
    store: Store | None = None,
) -> ParallelState:
    """Join the engine's process group; blocks until all `tp_size * pp_size` ranks have joined.

    `backend` is "gloo" (CPU) or "nccl" (on this process's current CUDA device). `init_method` is
    e.g. "tcp://host:port" (rank 0 opens the port), or "" with a `store` that another process holds.
    `timeout_s` also bounds every later call. Raises `torch.distributed.DistError` if the other
    ranks don't join within `timeout_s` seconds.
    """
    world_size = tp_size * pp_size
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is outside tp_size * pp_size = {world_size}.")
    pp_rank, tp_rank = divmod(rank, tp_size)
    if world_size == 1:
        return ParallelState.single()
    timeout = timedelta(seconds=timeout_s)
    is_nccl = backend == "nccl"
    dist.init_process_group(
        backend,
        init_method=init_method or None,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # Connects now rather than in the first step, and lets the groups below share resources.
        device_id=torch.device("cuda", torch.cuda.current_device()) if is_nccl else None,
    )
    world = dist.group.WORLD
    stages = [list(range(s * tp_size, (s + 1) * tp_size)) for s in range(pp_size)]
    tp_group = _group_of(rank, stages, timeout) if tp_size > 1 and pp_size > 1 else world
    if not is_nccl or pp_size == 1:
        return ParallelState(
            tp_rank, tp_size, pp_rank, pp_size, tp_group, world, recv_group=world, send_group=world
        )
    # Each boundary between stages has a group of its own: NCCL runs all transfers of a group one
    # after the other, and a stage's sends must not delay what it receives.
    recv_group = send_group = world
    for stage in range(pp_size - 1):
        group = _group_of(rank, [stages[stage] + stages[stage + 1]], timeout)
        if stage == pp_rank:
            send_group = group
        elif stage + 1 == pp_rank:
            recv_group = group
    return ParallelState(
        tp_rank,
        tp_size,
        pp_rank,
        pp_size,
        tp_group,
        world,
        recv_group,
        send_group,
        torch.cuda.Stream() if pp_rank > 0 else None,  # type: ignore[no-untyped-call]
    )


def _group_of(rank: int, members: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """The one of several new groups that `rank` belongs to.

    Collective: every rank of the world makes every group, in the same order.
    """
    mine: dist.ProcessGroup | None = None
    for ranks in members:
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            mine = group
    return mine
