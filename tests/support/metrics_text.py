"""What `/metrics` answers, as tests read it."""

from __future__ import annotations

import re

_COMMON = re.compile(r',?(?:model_name|ingress)="[^"]*"')


def bare(text: str) -> str:
    """The text without the labels that tell one server's ingresses from another's."""
    return _COMMON.sub("", text).replace("{,", "{").replace("{}", "")


def values(text: str) -> dict[str, float]:
    """Values by sample, without those labels. Samples that differ only in them are added up."""
    found: dict[str, float] = {}
    for line in bare(text).splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = found.get(name, 0.0) + float(value)
    return found
