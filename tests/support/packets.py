"""What TCP connections carry over the loopback device, as a listener on the wire would see it."""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Collection
from types import TracebackType

ETH_P_ALL = 3
SOL_PACKET, PACKET_STATISTICS = 263, 6
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 2**28
ETHERNET_BYTES = 14
LARGEST_FRAME = 2**17


class LoopbackCapture:
    """Records every TCP payload while its `with` block lasts.

    Entering raises `PermissionError` without the right to open packet sockets (CAP_NET_RAW).
    Leaving raises `RuntimeError` if the kernel dropped packets.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[bytes, bytes], dict[int, bytes]] = defaultdict(dict)

    def __enter__(self) -> LoopbackCapture:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._reader.join()
        statistics = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self._socket.close()
        _, dropped = struct.unpack("II", statistics)
        if dropped and kind is None:
            raise RuntimeError(f"{dropped} packets were dropped")

    def flows(self, ports: Collection[int]) -> list[bytes]:
        """The bytes that each connection with one of the TCP `ports` carried in one direction."""
        return [
            _joined(parts)
            for (_, ends), parts in self._parts.items()
            if not set(struct.unpack("!HH", ends)).isdisjoint(ports)
        ]

    def _read(self) -> None:
        while True:
            try:
                frame = self._socket.recv(LARGEST_FRAME)
            except TimeoutError:
                if self._ended.is_set():
                    return
                continue
            self._add(frame)

    def _add(self, frame: bytes) -> None:
        packet = frame[ETHERNET_BYTES:]
        if packet[:1] and packet[0] >> 4 == 4 and packet[9] == socket.IPPROTO_TCP:
            start, end = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
            ends = packet[12:20]
        elif packet[:1] and packet[0] >> 4 == 6 and packet[6] == socket.IPPROTO_TCP:
            start, end = 40, 40 + int.from_bytes(packet[4:6], "big")
            ends = packet[8:40]
        else:
            return
        # Packets beyond 64 KiB, which the loopback device may have, give their length as 0.
        segment = packet[start : end if end > start else None]
        ports, sequence = segment[:4], int.from_bytes(segment[4:8], "big")
        payload = segment[(segment[12] >> 4) * 4 :]
        if payload:
            parts = self._parts[ends, ports]
            parts[sequence] = max(parts.get(sequence, b""), payload, key=len)


def _joined(parts: dict[int, bytes]) -> bytes:
    """Segments in the order of their sequence numbers, which count bytes modulo 2**32."""
    first = next(iter(parts))
    joined = bytearray()
    for _, payload in sorted(
        ((number - first + 2**31) % 2**32, payload) for number, payload in parts.items()
    ):
        joined += payload
    return bytes(joined)
