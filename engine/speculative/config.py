"""`SpeculativeConfig`: the keys of `speculative_config`, which are vLLM's."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.registry import DRAFTERS

MAX_DRAFTS = 16
DEFAULT_LOOKUP_MAX = 5
DEFAULT_LOOKUP_MIN = 2
WITH_MODEL = ("draft_model",)
"""Methods that compute with `model`; the first is meant where the keys name a model alone."""
UNSUPPORTED = ("eagle", "eagle3", "medusa", "mtp", "mlp_speculator")
"""Methods of vLLM that need heads trained for the model."""


_METHODS = ", ".join(DRAFTERS)


class SpeculativeConfig(BaseModel):
    """Who drafts, and how many tokens a step."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    method: str
    """A word of `DRAFTERS`, or `module:Class` for a `Drafter` of one's own."""
    num_speculative_tokens: int = Field(4, ge=1, le=MAX_DRAFTS)
    """Drafts of a row and step, at most. Steps have fewer where that is faster."""
    model: str | None = None
    """Of a method that has one: the folder of a small model with the same vocabulary, or a hub
    id."""
    prompt_lookup_max: int | None = Field(None, ge=1, le=64)
    """ngram: the longest end of a request's tokens that is looked for in the tokens before."""
    prompt_lookup_min: int | None = Field(None, ge=1, le=64)
    """ngram: the shortest."""
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=256)
    """suffix: the longest end of a request's tokens that is looked for in recent outputs."""
    suffix_decoding_max_cached_requests: int = Field(1000, ge=1, le=100_000)
    """suffix: outputs that are kept for each cache namespace; the oldest leave first."""
    draft_length: Literal["adaptive", "fixed"] = "adaptive"
    """adaptive: each step has as many drafts as give the most tokens per second, by the step times
    and acceptance so far. fixed: always `num_speculative_tokens`."""

    @model_validator(mode="before")
    @classmethod
    def _known_method(cls, values: Any) -> Any:
        """`method` may be left out where vLLM finds it from the other keys."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if "method" not in values:
            if "prompt_lookup_max" in values or "prompt_lookup_min" in values:
                values["method"] = "ngram"
            elif "model" in values:
                values["method"] = WITH_MODEL[0]
            else:
                raise ValueError(f"method is missing; choose one of {_METHODS}")
        method = values["method"]
        if method in UNSUPPORTED:
            raise ValueError(
                f"method '{method}' needs draft heads, which Manta can't load yet; choose one of "
                + _METHODS
            )
        known = isinstance(method, str) and (method in DRAFTERS or ":" in method)
        if not known:
            raise ValueError(f"method {method!r} is unknown; choose one of {_METHODS}")
        if ":" not in method and (method in WITH_MODEL) != (values.get("model") is not None):
            raise ValueError(
                f"method {' or '.join(WITH_MODEL)} needs model, the folder of a small model, and "
                "no other method has one"
            )
        return values

    @model_validator(mode="after")
    def _lookup_order(self) -> Self:
        if self.lookup_min > self.lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.lookup_min}) is above prompt_lookup_max "
                f"({self.lookup_max}); lower the one or raise the other"
            )
        return self

    @property
    def lookup_max(self) -> int:
        """`prompt_lookup_max`, or its default."""
        if self.prompt_lookup_max is not None:
            return self.prompt_lookup_max
        return max(DEFAULT_LOOKUP_MAX, self.prompt_lookup_min or 0)

    @property
    def lookup_min(self) -> int:
        """`prompt_lookup_min`, or its default."""
        if self.prompt_lookup_min is not None:
            return self.prompt_lookup_min
        return min(DEFAULT_LOOKUP_MIN, self.prompt_lookup_max or DEFAULT_LOOKUP_MIN)

    @property
    def spare_tokens(self) -> int:
        """KV tokens that a request may hold beyond those that it has, for drafts of two steps."""
        return 2 * (self.num_speculative_tokens + 1)
