"""Records what client libraries and agents send.

    make record-clients
    .venv/bin/python -m tests.recorded.record NAME...

Each client is installed in its newest version under `.peers/clients`, and runs its script of
`tests/recorded/clients` against the HTTP application. Its requests go to `tests/recorded/bodies`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from deploy.http.settings import ApiSettings
from deploy.options import ServerOptions
from tests.recorded.recorder import Recorder
from tests.support.answering_client import AnsweringClient
from tests.support.http_application import Server

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS, BODIES = ROOT / "tests/recorded/clients", ROOT / "tests/recorded/bodies"
INSTALLED = ROOT / ".peers" / "clients"
INSTALL_S, RUN_S = 900, 240


class Client(NamedTuple):
    """A program that calls servers. The first package is the one whose version is told."""

    name: str
    script: str
    packages: tuple[str, ...]
    bare: bool = False
    """Its first package is installed without what it needs, which is more than the script needs."""
    tools: tuple[str, ...] = ()
    """Tools that it can run without asking; else its first is called."""

    @property
    def folder(self) -> Path:
        return INSTALLED / self.name

    @property
    def uses_npm(self) -> bool:
        return self.name in NPM

    @property
    def distribution(self) -> str:
        """The first package without extras."""
        return self.packages[0].split("[")[0]


WEBUI_NEEDS = (
    *("aiocache", "aiofiles", "aiohttp", "aiosqlite", "alembic", "authlib", "bcrypt"),
    *("beautifulsoup4", "chromadb", "fastapi", "httpx", "langchain-core", "loguru", "markdown"),
    *("mcp", "orjson", "pillow", "pyjwt[crypto]", "python-mimeparse", "python-socketio", "pytz"),
    *("redis", "requests", "sqlalchemy[asyncio]", "typer", "uvicorn", "validators"),
)
"""What the router of Open WebUI imports: a quarter of what the whole needs, and no torch."""
CLIENTS = (
    Client("openai-python", "openai_python.py", ("openai",)),
    Client("anthropic-python", "anthropic_python.py", ("anthropic",)),
    Client(
        "langchain", "langchain_agent.py", ("langchain", "langchain-openai", "langchain-anthropic")
    ),
    Client(
        "llama-index",
        "llama_index_agent.py",
        (
            "llama-index-core",
            "llama-index-llms-openai-like",
            "llama-index-embeddings-openai-like",
        ),
    ),
    Client("litellm", "litellm_routes.py", ("litellm",)),
    Client("pydantic-ai", "pydantic_ai_agent.py", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("openai-agents", "openai_agents_run.py", ("openai-agents",)),
    Client("instructor", "instructor_modes.py", ("instructor", "anthropic")),
    Client("llm", "llm.sh", ("llm",)),
    Client("lm-eval", "lm_eval.sh", ("lm_eval[api]", "transformers")),
    Client("aider", "aider.sh", ("aider-chat",)),
    Client("open-webui", "open_webui.py", ("open-webui", *WEBUI_NEEDS), bare=True),
    Client("openai-js", "openai_js.mjs", ("openai", "zod")),
    Client("anthropic-js", "anthropic_js.mjs", ("@anthropic-ai/sdk", "zod")),
    Client(
        "ai-sdk",
        "ai_sdk.mjs",
        ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic", "zod"),
    ),
    Client("promptfoo", "promptfoo.sh", ("promptfoo", "node@22")),
    Client("claude-code", "claude_code.sh", ("@anthropic-ai/claude-code",), tools=("Bash",)),
    Client("codex", "codex.sh", ("@openai/codex",), tools=("exec_command", "shell")),
)
NPM = ("openai-js", "anthropic-js", "ai-sdk", "promptfoo", "claude-code", "codex")


def install(client: Client) -> str:
    """Install the newest version, and return it."""
    folder = client.folder
    if client.uses_npm:
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "package.json"
        if not manifest.exists():
            manifest.write_text('{"private": true}')
        newest = [name if name.count("@", 1) else f"{name}@latest" for name in client.packages]
        run(["npm", "install", "--no-fund", "--no-audit", *newest], folder, INSTALL_S)
        package = folder / "node_modules" / client.packages[0]
        # npm may have left out the script that puts the program in its place.
        if (package / "install.cjs").exists():
            run(["node", str(package / "install.cjs")], folder, INSTALL_S)
        return str(json.loads((package / "package.json").read_text())["version"])
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--upgrade"]
    packages = client.packages
    if client.bare:
        run([*pip, "--no-deps", packages[0]], folder, INSTALL_S)
        packages = packages[1:]
    run([*pip, *packages], folder, INSTALL_S)
    code = f"import importlib.metadata as m; print(m.version({client.distribution!r}))"
    return run([python, "-c", code], folder, INSTALL_S).strip()


def run(command: list[str], folder: Path, timeout_s: float, **env: str) -> str:
    """What a command prints. Raises `RuntimeError` with what it said last if it fails."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # What it started ends with it.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"{command[0]} took more than {timeout_s:.0f} s") from None
    if process.returncode:
        said = (output + errors)[-3000:]
        raise RuntimeError(f"{command[0]} ended with status {process.returncode}:\n{said}")
    return output


@contextmanager
def script_of(client: Client) -> Iterator[list[str]]:
    """The command of its script. Node finds packages from the place of the script only."""
    script = SCRIPTS / client.script
    if script.suffix == ".sh":
        yield ["bash", str(script)]
    elif script.suffix == ".py":
        yield [str(client.folder / "bin" / "python"), "-P", str(script)]
    else:
        copy = client.folder / script.name
        shutil.copy(script, copy)
        yield ["node", str(copy)]


def requests_of(client: Client) -> list[dict[str, Any]]:
    """What the script makes the client send. Raises `RuntimeError` if it fails."""
    with tempfile.TemporaryDirectory() as home, script_of(client) as command:
        scratch = Path(home) / "scratch"
        scratch.mkdir()
        places = {str(scratch): "/scratch", home: "/home", str(ROOT): "/repository"}
        recorder = Recorder(places)
        settings = ApiSettings(ServerOptions(max_body_bytes=16 * 2**20))
        server = Server(AnsweringClient(client.tools), settings, recorder)
        server.start()
        bin_folder = client.folder / ("node_modules/.bin" if client.uses_npm else "bin")
        try:
            run(
                command,
                scratch,
                RUN_S,
                PATH=f"{bin_folder}:{os.environ['PATH']}",
                HOME=home,
                BASE_URL=f"http://127.0.0.1:{server.port}",
                OPENAI_API_KEY="none",
                ANTHROPIC_API_KEY="none",
                TOKENIZER=str(ROOT / "models" / "manta-small"),
            )
        except RuntimeError as error:
            raise RuntimeError("\n".join([str(error), *recorder.failures])) from None
        finally:
            server.stop()
    if not recorder.requests:
        raise RuntimeError("it sent no request")
    for failure in recorder.failures:
        print(f"{client.name}: answered {failure}", flush=True)
    return recorder.requests


def record(client: Client) -> None:
    """Write the client's file. Raises `RuntimeError` if it can't be installed or run."""
    version = install(client)
    recording = {"client": client.name, "version": version, "requests": requests_of(client)}
    path = BODIES / f"{client.name}.json"
    path.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n")
    print(f"{client.name} {version}: {len(recording['requests'])} requests", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients; none: all")
    names = parser.parse_args().names
    if unknown := set(names) - {client.name for client in CLIENTS}:
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    failed = {}
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        try:
            record(client)
        except (RuntimeError, OSError) as error:
            failed[client.name] = error
    for name, error in failed.items():
        print(f"{name} failed: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
