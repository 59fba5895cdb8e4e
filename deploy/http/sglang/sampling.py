"""`sampling_params` of a request."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema, model_validator

from deploy.http.body import Strict, refusal
from deploy.http.generation.plan import sampling_params
from deploy.http.generation.request import NamedConstraint, named_error
from engine.constraints import ConstraintSpec, structured
from engine.errors import RequestError
from engine.protocol.sampling_params import MAX_N, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
_MAX_INT = 2**31 - 1
_CONSTRAINTS: dict[str, Callable[[str], ConstraintSpec]] = {
    "json_schema": structured.json_schema,
    "regex": structured.regex,
    "ebnf": structured.grammar,
    "structural_tag": structured.structural_tag,
}
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
Stop = Annotated[
    str | list[str],
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_STRING,
                {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]
TokenIds = Annotated[
    list[int], WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(description="By token id."),
]


class SamplingFields(Strict):
    """How to choose the tokens. `SamplingParams.verify` checks the lists."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stop_regex": ("", []),
        "custom_params": ({},),
    }

    max_new_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    """Default: 128, or what the context leaves."""
    min_new_tokens: int = Field(0, ge=0, le=_MAX_INT)
    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=_MAX_INT)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: LogitBias = Field(default_factory=dict)
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stop = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    no_stop_trim: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    json_schema: str | None = None
    """JSON text."""
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    """JSON text."""
    stream_interval: int = Field(1, ge=1, le=_MAX_INT)

    @model_validator(mode="after")
    def _check(self) -> "SamplingFields":
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise refusal(f"{' and '.join(given)} exclude each other.", given[1])
        most = DEFAULT_MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        if self.min_new_tokens > most:
            raise refusal(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({most}).",
                "min_new_tokens",
            )
        return self

    def constraint(self) -> NamedConstraint | None:
        """What the output must be. Raises `RequestError`."""
        for name, make in _CONSTRAINTS.items():
            value = getattr(self, name)
            if value is not None:
                field = f"sampling_params.{name}"
                try:
                    return NamedConstraint(make(value), field)
                except RequestError as error:
                    raise named_error(error, field) from None
        return None

    def translate(self, **logprobs: Any) -> SamplingParams:
        """The parameters; `logprobs` are fields of them."""
        return sampling_params(
            self,
            {},
            min_tokens=self.min_new_tokens,
            seed=self.sampling_seed,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()} or None,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            include_stop_str_in_output=self.no_stop_trim,
            **logprobs,
        )
