"""Why there are no CPU kernels."""

from __future__ import annotations

from engine.errors import MantaError


class BuildError(MantaError):
    """The CPU kernels can't be built. `cause` says why and `remedy` what to do, both short and
    without a full stop."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy


class NoCompilerError(BuildError):
    """There is no C++ compiler."""
