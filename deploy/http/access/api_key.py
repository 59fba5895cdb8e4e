"""`ApiKey`: one entry of the keys file, and what it means for a request."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.errors import RequestError
from engine.protocol.sequence import KeyLimits

Role = Literal["user", "admin"]
Limit = Annotated[int | None, Field(ge=1, le=2**40)]


class ApiKey(BaseModel):
    """A caller. None as a limit: there is none."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Stands in metrics, and in the names of the key's cached prefixes."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the key's text, in hexadecimal."""
    role: Role = "user"
    max_running: Limit = None
    """Sequences that run at once in one engine replica."""
    max_queued_tokens: Limit = None
    """Prompt tokens that wait at once in one engine replica."""
    tokens_per_minute: Limit = None
    """Tokens of prompts and outputs, over all ingresses and engines."""
    lowest_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """The lowest number that its requests may have as `priority`; lower numbers go first."""

    @cached_property
    def limits(self) -> KeyLimits:
        """What an engine has to know of it."""
        return KeyLimits(self.name, self.max_running, self.max_queued_tokens)

    def namespace(self, cache_salt: str) -> str:
        """The part of the prefix cache that a request with this salt shares. Names have no slash,
        so no salt leads into the part of another key."""
        return f"{self.name}/{cache_salt}"

    def priority(self, given: int) -> int:
        """The priority of a request that asks for `given`; 0 is what requests have that don't ask.

        Raises `RequestError` if the key doesn't go that low.
        """
        if given == 0:
            return max(0, self.lowest_priority)
        if given < self.lowest_priority:
            raise RequestError(
                f"The priority of this key's requests must be at least {self.lowest_priority}.",
                "priority",
            )
        return given


def owner_of(key: ApiKey | None) -> str:
    """The name by which what is kept for a request is found again; "" without a key."""
    return "" if key is None else key.name


class KeyList(BaseModel):
    """What a keys file holds."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    keys: list[ApiKey]

    @model_validator(mode="after")
    def _check(self) -> "KeyList":
        for what in ("name", "sha256"):
            seen: set[str] = set()
            for key in self.keys:
                value = getattr(key, what)
                if value in seen:
                    raise ValueError(f"two keys have the {what} {value}")
                seen.add(value)
        return self
