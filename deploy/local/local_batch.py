"""`manta batch`: answers a file of requests without a server, with an engine in this process.

Stopped anywhere, the same command goes on: answers are in `OUTPUT.parts` until all are there.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import io
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import fsspec
import msgspec
from tqdm import tqdm

from deploy.http.api import build_api
from deploy.http.batches.line_asker import LineAsker
from deploy.http.batches.lines import Checked, Source, check_lines
from deploy.http.batches.output import BatchOutput
from deploy.http.batches.routes import BATCH_ENDPOINTS
from deploy.http.batches.run import BatchRun, width_of
from deploy.http.engine_client import ModelInfo
from deploy.http.files.file_store import BLOCK, FileStore, write_whole
from deploy.http.served_models import ServedModels
from deploy.http.settings import ApiSettings
from deploy.local.local_client import LocalClient
from deploy.options import ServerOptions
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, RequestError
from engine.llm import LLM
from engine.process.interrupts import HeldInterrupts

SHOWN = 10
"""Problems of a file."""
LOCK = "lock"
"""A file beside the parts."""
_NAME = "batch"
"""Of the parts, of which there is one batch."""


class Begun(msgspec.Struct):
    """What a batch was begun with; it is gone on with nothing else."""

    source: str
    """SHA-256 of the input."""
    model: str
    """`ModelInfo.digest`."""
    made_at: int
    """Unix time that the answers bear."""


class LocalBatch:
    """One run of the command."""

    def __init__(
        self,
        source: str,
        output: str,
        engine: EngineConfig,
        server: ServerOptions,
        info: ModelInfo,
    ) -> None:
        self._source = source
        self._output = Path(output)
        self._parts = Path(f"{output}.parts")
        self._engine = engine
        self._server = server
        self._served = info

    def run(self) -> int:
        """Returns the exit status: 0; 1 if a line, or the engine, failed. Raises `ConfigError`."""
        if not self._output.absolute().parent.is_dir():
            raise ConfigError(f"the folder of '{self._output}' doesn't exist.")
        source = Source(self._opened, self._server.max_body_bytes, BATCH_ENDPOINTS)
        checked = asyncio.run(check_lines(source))
        if checked.problems:
            raise ConfigError(_listed(self._source, checked))
        info = self._info(checked.model)
        with self._locked():
            return self._run(info, source, checked)

    def _run(self, info: ModelInfo, source: Source, checked: Checked) -> int:
        begun = self._begin(info)
        server = self._server.model_copy(
            update={"request_store": "none", "api_keys_file": None, "otlp_endpoint": None}
        )
        with ExitStack() as stack:
            with HeldInterrupts():
                llm = LLM(**self._engine.model_dump(exclude_unset=True))
                stack.enter_context(llm)
            client = LocalClient(llm, info)
            app = build_api(lambda: ServedModels(client), ApiSettings(server))
            asker = LineAsker(app.state.endpoints, begun.model, begun.made_at, begun.source)
            try:
                return asyncio.run(self._answer(client, source, checked, asker))
            except KeyboardInterrupt:
                print("stopped; the same command goes on", file=sys.stderr)
                return 130
            except (EngineDeadError, RequestError) as error:
                print(f"error: {error}; the same command goes on", file=sys.stderr)
                return 1

    async def _answer(
        self, client: LocalClient, source: Source, checked: Checked, asker: LineAsker
    ) -> int:
        output = BatchOutput(FileStore(str(self._parts), float("inf"), sys.maxsize), _NAME, "")
        await output.load()
        done = output.completed + output.failed
        bar = tqdm(
            total=checked.num_requests,
            initial=done,
            unit="line",
            file=sys.stderr,
            dynamic_ncols=True,
        )

        async def flushed() -> None:
            health = await client.health()
            if not health.ok:
                raise EngineDeadError(health.detail)
            bar.update(output.completed + output.failed - bar.n)
            bar.set_postfix(failed=output.failed, tokens=sum(output.tokens))

        client.start()
        try:
            with bar:
                await BatchRun(source, output, asker, await width_of(client), flushed).run()
        finally:
            await client.stop()
        with closing(await output.assemble()) as whole:
            if whole.completed + whole.failed != checked.num_requests:
                raise ConfigError(f"'{self._parts}' was changed meanwhile.")
            write_whole(str(self._output), whole.lines())
            failed = f", {whole.failed} failed" if whole.failed else ""
            print(f"{whole.completed} lines answered{failed}: {self._output}", file=sys.stderr)
        old = self._parts.with_name(f"{self._parts.name}.done")
        self._parts.rename(old)  # nobody goes on with a part of it
        shutil.rmtree(old)
        return 1 if whole.failed else 0

    def _opened(self) -> IO[bytes]:
        try:
            return io.BufferedReader(fsspec.open(self._source, "rb").open(), BLOCK)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"'{self._source}' can't be read: {error}.") from error

    def _info(self, named: str) -> ModelInfo:
        """The model, which is also called as the lines call it, unless the configuration says its
        name: then that is the only one."""
        info = self._served
        if named and not info.has(named):
            if self._server.served_model_name is not None:
                raise ConfigError(
                    f"the lines name the model '{named[:200]}', and it is called '{info.name}'; if "
                    f"it is to answer them, add --set served_model_name={named[:200]}."
                )
            print(f"'{named[:200]}' of the lines is {self._engine.model}", file=sys.stderr)
            info = replace(info, name=named)
        return info

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other commands from this output."""
        self._parts.mkdir(mode=0o700, exist_ok=True)
        with (self._parts / LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another command writes '{self._output}' just now.") from None
            yield

    def _begin(self, info: ModelInfo) -> Begun:
        """What the parts that are there were begun with, or what is begun now."""
        digest = hashlib.sha256()
        with self._opened() as file:
            while block := file.read(BLOCK):
                digest.update(block)
        now = Begun(digest.hexdigest(), info.digest, int(time.time()))
        place = self._parts / "begun.json"
        if {path.name for path in self._parts.iterdir()} == {LOCK}:
            write_whole(str(place), [msgspec.json.encode(now)])
            return now
        try:
            begun = msgspec.json.decode(place.read_bytes(), type=Begun)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"'{place}' can't be read: {error}; remove the folder, or name another output."
            ) from None
        for was, is_now, what in (
            (begun.source, now.source, "another input"),
            (begun.model, now.model, "another model or configuration"),
        ):
            if was != is_now:
                raise ConfigError(
                    f"'{self._parts}' holds answers that were begun with {what}; remove it, or "
                    "name another output."
                )
        return begun


def _listed(source: str, checked: Checked) -> str:
    lines = [
        f"line {problem.line}: {problem.message}" if problem.line else problem.message
        for problem in checked.problems
    ]
    more = len(lines) - SHOWN
    return "\n  ".join(
        [f"'{source}' can't be run:", *lines[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
    )
