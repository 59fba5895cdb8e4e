"""The `manta` command: serve, check, chat, batch, bench, expert-map."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from engine import __version__
from engine.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit status: 0; 1 if the command failed; 2 if it can't be done as asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # has a command line of its own
        from benchmarks.load.command import main as bench

        return bench(arguments[1:])
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(_unrecognized(unknown))
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except ConfigError as error:
        target = getattr(options, "target", "")
        print(f"error: {target}: {error}" if target else f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # during the checks, or while a model is downloaded
        return 130


def _unrecognized(arguments: list[str]) -> str:
    """argparse's words; what is a key of Manta's, and how Manta calls what vLLM and SGLang have."""
    from deploy.options import ServerOptions
    from engine.config import EngineConfig
    from engine.other_names import OTHER_NAMES

    message = f"unrecognized arguments: {' '.join(arguments)}"
    own = EngineConfig.model_fields.keys() | ServerOptions.model_fields.keys()
    hints = []
    for word in arguments:
        name = word.partition("=")[0]
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--"):
            continue
        if key in own:
            hints.append(f"{name}: the key is '{key}'.")
        elif key in OTHER_NAMES:
            hints.append(f"{name}: {OTHER_NAMES[key]}")
    if not hints:
        return message
    return " ".join([f"{message}.", *hints, "Keys are set by --set key=value."])


def serve(options: argparse.Namespace) -> int:
    """Run `manta serve`; returns the exit status."""
    from deploy.start import launch
    from deploy.start.target import load_target

    target = load_target(options.target, options.set, options.host, options.port, _tls(options))
    return launch.serve(target, use_haproxy=options.haproxy, verbose=options.verbose)


def check(options: argparse.Namespace) -> int:
    """`manta check`: everything that `serve` checks, without starting anything."""
    from deploy.start import launch
    from deploy.start.banner import describe
    from deploy.start.devices import memory_line, weights_line
    from deploy.start.target import load_target
    from engine.checkpoint.tried_types import model_line

    target = load_target(options.target, options.set, options.host, options.port, _tls(options))
    for app in target.applications:
        print(describe(app))
        print(f"model: {model_line(app.resolved.model)}")
        if weights := weights_line(app):
            print(f"weights: {weights}")
        cache = app.engine.max_total_tokens
        print(f"longest request: {app.resolved.max_model_len} tokens")
        print(f"KV cache: {f'{cache} tokens' if cache else 'as large as memory allows'}")
        if not os.environ.get("RAY_ADDRESS"):
            print(memory_line(app))
    with ExitStack() as stack:
        for warning in launch.check(target, options.haproxy, stack):
            print(f"warning: {warning}")
    if os.environ.get("RAY_ADDRESS"):
        print(
            "RAY_ADDRESS is set: files, memory and GPUs are those of its machines, not checked here"
        )
    print(f"would listen on {target.http['host']} port {target.http['port']}")
    print("ok")
    return 0


def _tls(options: argparse.Namespace) -> dict[str, str]:
    given = {"ssl_certfile": options.ssl_certfile, "ssl_keyfile": options.ssl_keyfile}
    return {key: value for key, value in given.items() if value is not None}


def chat(options: argparse.Namespace) -> int:
    """Run `manta chat`; returns the exit status."""
    from deploy.start.chat import Chat

    return Chat(options.url, options.model, options.max_tokens, options.temperature).run()


def batch(options: argparse.Namespace) -> int:
    """Run `manta batch`; returns the exit status."""
    from deploy.local.local_batch import LocalBatch
    from deploy.start.target import load_target

    apps = load_target(options.target, options.set).applications
    if len(apps) > 1:
        raise ConfigError("several models are served by it; name the one that is to answer.")
    (app,) = apps
    return LocalBatch(options.input, options.output, app.engine, app.server, app.model_info()).run()


def expert_map(options: argparse.Namespace) -> int:
    """Run `manta expert-map`; returns the exit status."""
    import msgspec

    from deploy.start.expert_counts_file import read_expert_counts
    from engine.checkpoint.expert_balance import busiest, in_order
    from engine.checkpoint.expert_map import ExpertMap

    counts, groups = read_expert_counts(options.counts), options.groups
    made = ExpertMap.made_of(counts, groups)
    tokens = list(counts.values())
    before, after = (
        busiest(tokens, placement)
        for placement in (in_order(tokens, groups), list(made.layers.values()))
    )
    print(msgspec.json.encode(made).decode())
    print(
        f"{len(counts)} layers: their busiest groups have {before:.2f} times the mean of tokens "
        f"without the map and {after:.2f} times with it",
        file=sys.stderr,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="manta", description="Serve large language models from Ray, behind OpenAI's API."
    )
    parser.add_argument("--version", action="version", version=f"manta {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    server = commands.add_parser("serve", help="serve a model until Ctrl-C")
    _add_target(server)
    server.add_argument(
        "--verbose", action="store_true", help="print what Ray, Serve and HAProxy say, too"
    )
    server.set_defaults(run=serve, parser=server)

    checker = commands.add_parser("check", help="check a configuration without starting anything")
    _add_target(checker)
    checker.set_defaults(run=check, parser=checker)

    talk = commands.add_parser("chat", help="talk to a served model in the terminal")
    talk.add_argument("--url", default=DEFAULT_URL, help=f"of the server (default {DEFAULT_URL})")
    talk.add_argument("--model", help="default: the first that the server has")
    talk.add_argument("--max-tokens", type=int, help="of an answer (default: the model's limit)")
    talk.add_argument("--temperature", type=float, help="default: the server's")
    talk.set_defaults(run=chat, parser=talk)

    lines = commands.add_parser("batch", help="answer a file of requests without a server")
    lines.add_argument("input", help="requests as OpenAI's Batch API has them, a path or a URL")
    lines.add_argument("-o", "--output", required=True, help="file for the answers")
    _add_model(lines, "--model", dest="target")
    lines.set_defaults(run=batch, parser=lines)

    placing = commands.add_parser(
        "expert-map", help="place a mixture's experts by how many tokens each got"
    )
    placing.add_argument("counts", help="a saved answer of /metrics (enable_expert_metrics: true)")
    placing.add_argument(
        "--groups", type=int, required=True, help="of workers: ep_size, or tp_size without it"
    )
    placing.set_defaults(run=expert_map, parser=placing)

    commands.add_parser("bench", help="measure a server under load (`manta bench --help`)")
    return parser


def _add_model(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    from deploy.start.target import DEFAULT

    parser.add_argument(
        name,
        metavar="CONFIG|MODEL",
        default=DEFAULT,
        help="a config file, a model folder, a GGUF file, or a hub id as owner/name "
        f"(default {DEFAULT})",
        **options,
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a key of the application's args; may be repeated",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, "target", nargs="?")
    parser.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="HAProxy in front instead of Serve's Python proxy (default where Ray brings it)",
    )
    parser.add_argument("--host", help="overrides http_options.host")
    parser.add_argument("--port", type=int, help="overrides http_options.port")
    parser.add_argument("--ssl-certfile", help="overrides http_options.ssl_certfile: serve https")
    parser.add_argument("--ssl-keyfile", help="overrides http_options.ssl_keyfile")


if __name__ == "__main__":
    sys.exit(main())
