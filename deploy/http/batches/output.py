"""`BatchOutput`: the answers of a batch, while it runs in parts, at the end as files.

Each part is written once and for good, by whatever process runs the batch. A line that two
processes answered is in two parts, and once in the files: its first answer counts. The files have
the lines in the order of the input.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from typing import IO, NamedTuple

import msgspec

from deploy.http.body import encode_json
from deploy.http.files.file_store import FileStore

PART_BYTES = 4 << 20
"""A part is written at the latest when it is so large."""
_NONE, _FAILED, _GOOD = range(3)
"""How a line ended."""


class Tokens(NamedTuple):
    """What a line took."""

    input: int = 0
    output: int = 0

    def plus(self, more: Tokens) -> Tokens:
        """Both together."""
        return Tokens(self.input + more.input, self.output + more.output)


class Answer(NamedTuple):
    """Of one line. `status`: of HTTP; 0 if it was never asked. `text`: the output's line."""

    number: int
    status: int
    tokens: Tokens
    text: bytes

    @property
    def is_good(self) -> bool:
        """Whether it goes to the output's file, not to that of errors."""
        return 200 <= self.status < 300


class _Answers:
    """Answers by the numbers of their lines. The first one of a line counts."""

    def __init__(self) -> None:
        self._ends = bytearray()
        """By line number: `_NONE`, `_FAILED` or `_GOOD`."""
        self.completed = self.failed = 0
        """Lines, by how they ended."""
        self.tokens = Tokens()

    def has(self, number: int) -> bool:
        """Whether a line has an answer."""
        return number < len(self._ends) and self._ends[number] != _NONE

    def _count(self, answer: Answer) -> bool:
        """Take an answer; False if its line has one."""
        if self.has(answer.number):
            return False
        self._ends.extend(bytes(max(answer.number + 1 - len(self._ends), 0)))
        self._ends[answer.number] = _GOOD if answer.is_good else _FAILED
        if answer.is_good:
            self.completed += 1
        else:
            self.failed += 1
        self.tokens = self.tokens.plus(answer.tokens)
        return True


class BatchOutput(_Answers):
    """Of one batch: the answers that are in parts. `load` comes first. What can't be kept raises
    `RequestError`."""

    def __init__(self, files: FileStore, batch_id: str, owner: str) -> None:
        """`files`: where its parts are."""
        super().__init__()
        self._files = files
        self._batch = batch_id, owner
        self._waiting: list[Answer] = []
        self.waiting_bytes = 0

    async def load(self) -> None:
        """Learn what parts there are."""

        def read(part: IO[bytes]) -> None:
            for line in part:
                self._count(_parsed(line))

        await self._files.read_parts(*self._batch, read)

    def add(self, answer: Answer) -> None:
        """To the next part."""
        self._waiting.append(answer)
        self.waiting_bytes += len(answer.text)

    async def flush(self) -> None:
        """Write a part of what was added. If that fails, the next one has it, too."""
        answers, self._waiting = self._waiting, []
        self.waiting_bytes = 0
        if not answers:
            return
        data = b"".join(
            b"%d\t%d\t%d\t%d\t%b\n" % (a.number, a.status, *a.tokens, a.text) for a in answers
        )
        try:
            await self._files.add_part(*self._batch, data)
        except BaseException:
            self._waiting = answers + self._waiting
            self.waiting_bytes += len(data)
            raise
        for answer in answers:
            self._count(answer)

    async def assemble(self) -> Assembled:
        """All parts as one. To be closed."""
        whole = Assembled()
        await self._files.read_parts(*self._batch, whole.take)
        return whole


class Assembled(_Answers):
    """All answers in one local file without a name, and where each line's is in it."""

    def __init__(self) -> None:
        super().__init__()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._starts, self._sizes = array("q"), array("q")
        self._end = 0

    def take(self, part: IO[bytes]) -> None:
        """One more part, behind the others."""
        for line in part:
            answer = _parsed(line)
            if self._count(answer):
                self._append(answer)

    def _append(self, answer: Answer) -> None:
        missing = [0] * (answer.number + 1 - len(self._starts))
        self._starts.extend(missing)
        self._sizes.extend(missing)
        self._starts[answer.number], self._sizes[answer.number] = self._end, len(answer.text)
        self._end += self._file.write(answer.text)

    def lines(self, good: bool | None = None) -> Iterator[bytes]:
        """Lines of the output, in the order of the input; `good`: those alone that ended so."""
        wanted = (_FAILED, _GOOD) if good is None else (_GOOD if good else _FAILED,)
        for number, end in enumerate(self._ends):
            if end in wanted:
                self._file.seek(self._starts[number])
                yield self._file.read(self._sizes[number]) + b"\n"

    def close(self) -> None:
        """Forget it."""
        self._file.close()


class _Shape(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Reply(msgspec.Struct):
    usage: _Shape | None = None


_usage = msgspec.json.Decoder(_Reply)


def answered(
    number: int, line_id: str, custom_id: str, status: int, request_id: str, body: bytes
) -> Answer:
    """The answer to a line that an endpoint gave, as OpenAI's output files have it."""
    usage = _usage.decode(body).usage or _Shape()
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    line = {"id": line_id, "custom_id": custom_id, "response": response, "error": None}
    tokens = Tokens(
        usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens
    )
    return Answer(number, status, tokens, encode_json(line))


def unanswered(number: int, line_id: str, custom_id: str, code: str, message: str) -> Answer:
    """The answer to a line that was never asked."""
    error = {"code": code, "message": message}
    line = {"id": line_id, "custom_id": custom_id, "response": None, "error": error}
    return Answer(number, 0, Tokens(), encode_json(line))


def _parsed(line: bytes) -> Answer:
    """A line of a part."""
    number, status, taken, made, text = line[:-1].split(b"\t", 4)
    return Answer(int(number), int(status), Tokens(int(taken), int(made)), text)
