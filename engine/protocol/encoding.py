"""Messages as bytes: MessagePack, with numpy arrays as extensions of dtype, shape and raw bytes.

Arrays larger than `INLINE_BYTES` become frames of their own, so they are never copied into the
header.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

INLINE_BYTES = 4096
_EXT_ARRAY = 1
_EXT_ARRAY_FRAME = 2


def encode(message: Any) -> list[bytes | memoryview]:
    """Frames of `message`: the MessagePack header, then its large arrays."""
    frames: list[bytes | memoryview] = [b""]

    def hook(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.nbytes <= INLINE_BYTES:
            return _inline(value)
        array = np.ascontiguousarray(value)
        frames.append(array.data.cast("B"))
        return msgspec.msgpack.Ext(
            _EXT_ARRAY_FRAME,
            (len(frames) - 1).to_bytes(2, "little") + _header(array.dtype.char, array.shape),
        )

    frames[0] = msgspec.msgpack.encode(message, enc_hook=hook)
    return frames


def encode_inline(message: Any) -> bytes:
    """`message` as one byte string, for arrays of any size; `decode([b], kind)` reads it.

    For transports that take a single value (a Ray call).
    """
    return msgspec.msgpack.encode(message, enc_hook=_inline)


def _inline(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"can't encode {type(value).__name__} in a message")
    # tobytes gives C order for any layout.
    return msgspec.msgpack.Ext(_EXT_ARRAY, _header(value.dtype.char, value.shape) + value.tobytes())


def decode(frames: Sequence[bytes | memoryview], kind: type[T]) -> T:
    """Rebuild a `kind` from `encode`'s frames. Raises `msgspec.MsgspecError` on a bad message.

    Arrays are read-only views of the frames.
    """

    def ext_hook(code: int, data: memoryview) -> Any:
        if code == _EXT_ARRAY:
            size = 2 + 4 * data[1]
            return _array(data[size:], *_parse(bytes(data[:size])))
        if code == _EXT_ARRAY_FRAME:
            index = int.from_bytes(data[:2], "little")
            return _array(frames[index], *_parse(bytes(data[2:])))
        raise msgspec.ValidationError(f"unknown extension {code}")

    return msgspec.msgpack.decode(frames[0], type=kind, ext_hook=ext_hook, dec_hook=_keep_array)


def _keep_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise msgspec.ValidationError(f"expected {kind.__name__}, got {type(value).__name__}")


@lru_cache(maxsize=4096)
def _header(char: str, shape: tuple[int, ...]) -> bytes:
    head = bytes([ord(char), len(shape)])
    return head + b"".join(n.to_bytes(4, "little") for n in shape)


@lru_cache(maxsize=4096)
def _parse(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and shape that `_header` encoded."""
    sizes = (header[i : i + 4] for i in range(2, 2 + 4 * header[1], 4))
    return np.dtype(chr(header[0])), tuple(int.from_bytes(size, "little") for size in sizes)


def _array(data: bytes | memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    flat: np.ndarray = np.frombuffer(data, dtype)
    # Most arrays have one dimension, and a reshape would double the cost of decoding one.
    return flat if flat.shape == shape else flat.reshape(shape)
