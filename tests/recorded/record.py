"""Records what client libraries and agents send: `make record-clients`, or `record.py NAME...`.

Each client is installed in its newest version under `.peers/clients`, and runs its script of
`tests/recorded/clients` against the HTTP application. Its requests go to `tests/recorded/bodies`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from deploy.http.settings import ApiSettings  # noqa: E402
from tests.recorded.answering_client import AnsweringClient  # noqa: E402
from tests.recorded.recorder import Recorder  # noqa: E402
from tests.support.http_application import Server  # noqa: E402

SCRIPTS, BODIES = ROOT / "tests/recorded/clients", ROOT / "tests/recorded/bodies"
INSTALLED = ROOT / ".peers" / "clients"
INSTALL_S, RUN_S = 900, 240


class Client(NamedTuple):
    """A program that calls servers. The first package is the one whose version is told."""

    name: str
    script: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of its installation."""
    tools: tuple[str, ...] = ()
    """Tools that it can run without asking; else its first is called."""

    @property
    def folder(self) -> Path:
        return INSTALLED / self.name

    @property
    def uses_npm(self) -> bool:
        return not (self.folder / "pyvenv.cfg").exists() and self.name in NPM

    @property
    def distribution(self) -> str:
        """The first package without extras."""
        return self.packages[0].split("[")[0]


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
    Client("lm-eval", "lm_eval.sh", ("lm_eval[api]",)),
    Client("aider", "aider.sh", ("aider-chat",)),
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
    if client.name in NPM:
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
    command = [python, "-m", "pip", "install", "-q", "--upgrade", *client.options, *client.packages]
    run(command, folder, INSTALL_S)
    code = f"import importlib.metadata as m; print(m.version({client.distribution!r}))"
    return run([python, "-c", code], folder, INSTALL_S).strip()


def run(command: list[str], folder: Path, timeout_s: float, **env: str) -> str:
    """What a command prints. Raises `RuntimeError` with what it said last if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} took more than {timeout_s:.0f} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"{command[0]} ended with status {done.returncode}:\n{said}")
    return done.stdout


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
        settings = ApiSettings(max_body_bytes=16 * 2**20)
        server = Server(AnsweringClient(client.tools), settings, recorder)
        server.start()
        bin_folder = client.folder / ("node_modules/.bin" if client.name in NPM else "bin")
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
