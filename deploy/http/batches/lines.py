"""Lines of a batch's input: each is a request, as in OpenAI's Batch API and vLLM's `run-batch`.

Memory doesn't grow with the file: it is read line by line, and no line is read further than it may
be long. What it holds per line is a hash of 8 bytes, until the file is checked.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing, closing
from typing import IO, Any, Literal, NamedTuple

import msgspec
import numpy as np

MAX_PROBLEMS = 100
"""That are told of one file."""
AT_A_TIME, BYTES_AT_A_TIME = 64, 1 << 20
"""Lines that are read in one visit of a thread, and their bytes but for the last one's."""
MAX_CUSTOM_ID = 512
"""Characters."""
_BOM = b"\xef\xbb\xbf"


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class BatchLine(NamedTuple):
    """One request. `number`: of the line in its file, from 1; `body`: a JSON object."""

    number: int
    custom_id: str
    url: str
    body: bytes


class LineProblem(msgspec.Struct):
    """What is wrong with a line."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Checked(NamedTuple):
    """What a file holds. `model`: the one that its lines name; "" for the server's first."""

    num_requests: int
    model: str
    problems: list[LineProblem]


class _Named(msgspec.Struct):
    model: str = ""


_line = msgspec.json.Decoder(_Line)
_model = msgspec.json.Decoder(_Named)


def raw_lines(file: IO[bytes], limit: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that hold something, with their numbers. One that is longer than `limit`
    bytes is cut to one byte more."""
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        cut = line
        while cut and not cut.endswith(b"\n") and len(cut) == limit + 1:
            cut = file.readline(limit + 1)
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield number, line


def read_line(number: int, line: bytes, limit: int, urls: Collection[str]) -> BatchLine:
    """A line, checked. `urls`: those that it may have. Raises `LineError`."""

    def wrong(code: str, message: str, param: str | None = None) -> LineError:
        return LineError(LineProblem(code, message, number, param))

    if len(line) > limit:
        raise wrong("line_too_long", f"The line is longer than {limit} bytes.")
    try:
        line.decode()
        found = _line.decode(line)
    except UnicodeDecodeError as error:
        message = f"The line isn't UTF-8: a wrong byte at {error.start + 1}."
        raise wrong("invalid_json_line", message) from None
    except msgspec.ValidationError as error:
        raise wrong("invalid_request", f"{error}.") from None
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"The line isn't a JSON object: {error}."
        raise wrong("invalid_json_line", message) from None
    if not 0 < len(found.custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters."
        raise wrong("invalid_custom_id", message, "custom_id")
    if found.url not in urls:
        shown = ", ".join(sorted(urls))
        if len(urls) == 1:
            shown = f"the batch's endpoint, {shown}"
        raise wrong("invalid_url", f"url must be {shown}, not {found.url[:100]!a}.", "url")
    body = bytes(found.body)
    if not body.startswith(b"{"):
        raise wrong("invalid_request", "body must be a JSON object.", "body")
    return BatchLine(number, found.custom_id, found.url, body)


class LineError(Exception):
    """A line that can't be a request."""

    def __init__(self, problem: LineProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def model_of(line: BatchLine) -> str:
    """The model that its body names; "" if it names none that is a text."""
    try:
        return _model.decode(line.body).model
    except msgspec.ValidationError:  # its endpoint will say what is wrong
        return ""


class Source(NamedTuple):
    """Where lines come from. `open` opens them; `limit` and `urls` are those of `read_line`;
    `in_thread` runs what waits for the file."""

    open: Callable[[], IO[bytes]]
    limit: int
    urls: Collection[str]
    in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread

    async def several(self) -> AsyncGenerator[list[tuple[int, bytes]], None]:
        """All lines that hold something, with their numbers, some at a time."""

        def read() -> list[tuple[int, bytes]]:
            found, size = [], 0
            for line in lines:
                found.append(line)
                size += len(line[1])
                if len(found) == AT_A_TIME or size >= BYTES_AT_A_TIME:
                    break
            return found

        with closing(await self.in_thread(self.open)) as file:
            lines = raw_lines(file, self.limit)
            while found := await self.in_thread(read):
                yield found

    def read(self, number: int, line: bytes) -> BatchLine:
        """As `read_line`."""
        return read_line(number, line, self.limit, self.urls)


async def check_lines(source: Source) -> Checked:
    """Read a whole file, without keeping others from the loop for long."""
    problems: list[LineProblem] = []
    hashes = array("Q")
    model: str | None = None
    async with aclosing(source.several()) as lines:
        async for found in lines:
            for number, raw in found:
                try:
                    line = source.read(number, raw)
                except LineError as error:
                    problems.append(error.problem)
                    continue
                hashes.append(_hash(line.custom_id))
                named = model_of(line)
                model = named if model is None else model
                if named != model:
                    message = (
                        "All lines of a batch must name the same model: "
                        f"{named[:100]!a} is not {model[:100]!a}."
                    )
                    problems.append(LineProblem("mismatched_model", message, number, "body.model"))
            if len(problems) >= MAX_PROBLEMS:
                return Checked(len(hashes), model or "", problems[:MAX_PROBLEMS])
    if not hashes and not problems:
        problems = [LineProblem("empty_file", "The file holds no request.")]
    values = np.sort(np.frombuffer(hashes, np.uint64))
    twice = set(values[1:][values[1:] == values[:-1]].tolist())
    if twice:
        problems += await _repeated(source, twice)
    return Checked(len(hashes), model or "", problems[:MAX_PROBLEMS])


async def _repeated(source: Source, twice: set[int]) -> list[LineProblem]:
    """Lines whose `custom_id` an earlier one has. `twice`: hashes that several have."""
    first: dict[str, int] = {}
    problems: list[LineProblem] = []
    async with aclosing(source.several()) as lines:
        async for found in lines:
            for number, raw in found:
                try:
                    line = source.read(number, raw)
                except LineError:  # told already
                    continue
                if _hash(line.custom_id) not in twice:
                    continue
                before = first.setdefault(line.custom_id, number)
                if before != number:
                    message = f"Line {before} has the same custom_id."
                    problem = LineProblem("duplicate_custom_id", message, number, "custom_id")
                    problems.append(problem)
            if len(problems) >= MAX_PROBLEMS:
                break
    return problems


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
