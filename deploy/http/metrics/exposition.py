"""`Family`: all samples of one metric, in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deploy.http.engine_client import PlainFamily


class Family(NamedTuple):
    """`name` is the one that the TYPE line has: that of a counter ends in `_total`."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    help: str
    samples: str
    """Lines, each with its line end; empty if there is no sample."""


def label_text(labels: Mapping[str, str]) -> str:
    """Labels as they stand between the braces of a sample."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def joined(*texts: str) -> str:
    """Several label texts as one; those that are empty are left out."""
    return ",".join(filter(None, texts))


def sample(name: str, labels: str, value: float) -> str:
    """One line. `labels` is a label text."""
    braces = f"{{{labels}}}" if labels else ""
    return f"{name}{braces} {_number(value)}\n"


def exposition(families: Iterable[Family | PlainFamily]) -> bytes:
    """The whole text. Families of one name, from several processes, are put together."""
    heads: dict[str, tuple[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for name, kind, help_text, lines in families:
        heads.setdefault(name, (kind, help_text))
        samples.setdefault(name, []).append(lines)
    parts: list[str] = []
    for name, (kind, help_text) in heads.items():
        parts.append(f"# HELP {name} {_escape_help(help_text)}\n# TYPE {name} {kind}\n")
        parts += samples[name]
    return "".join(parts).encode()


def scalar(
    name: str,
    kind: str,
    help_text: str,
    values: Sequence[tuple[str, float]],
) -> Family:
    """A counter or gauge of pairs of label text and value."""
    lines = "".join(sample(name, labels, value) for labels, value in values)
    return Family(name, kind, help_text, lines)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else ("+Inf" if number > 0 else "-Inf")
