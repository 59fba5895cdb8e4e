"""Fields that completions and chat completions have in common."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from deploy.http.body import Strict, refusal
from deploy.http.engine_client import ModelInfo
from deploy.http.generation.plan import sampling_params
from deploy.http.generation.request import Delivery, NamedConstraint, Truncation
from deploy.http.openai.logprobs import LogprobStyle
from deploy.http.openai.structured import (
    ResponseFormat,
    StructuredOutputs,
    constraint_field,
    constraint_spec,
)
from engine.protocol.sampling_params import (
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOKEN_IDS,
    SamplingParams,
)

MAX_PROMPTS = 2048
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
_MAX_INT = 2**31 - 1


class StreamOptions(Strict):
    """`include_usage`: a last chunk holds the usage. `continuous_usage_stats`: every chunk does.

    As in vLLM, `include_usage: false` switches both off.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Padding against traffic analysis, a choice of OpenAI's servers; accepted, never added."""

    @property
    def usage_at_end(self) -> bool:
        """Whether the last chunk holds the usage."""
        if self.include_usage is None:
            return self.continuous_usage_stats
        return self.include_usage

    @property
    def usage_always(self) -> bool:
        """Whether every chunk holds the usage so far."""
        return self.usage_at_end and self.continuous_usage_stats


def _check_stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise refusal("stop must be a string or a list of strings.")
    return texts


def _check_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise refusal("logit_bias must map token ids to numbers.")
    bias = {}
    for key, number in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
            token = int(key)
        elif type(key) is int:
            token = key
        else:
            raise refusal(f"logit_bias has the key {str(key)[:40]!r}, which is not a token id.")
        if type(number) not in (int, float) or not abs(number) <= 100:
            raise refusal(f"logit_bias of token {token} must be a number from -100 to 100.")
        bias[token] = float(number)
    return bias


def _check_bad_words(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise refusal("bad_words must be a list of strings.")
    if not all(word.strip() for word in value):
        raise refusal("bad_words must not hold empty strings.")
    if len(value) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_LENGTH for word in value):
        raise refusal(
            f"bad_words takes at most {MAX_BAD_WORDS} strings of {MAX_BAD_WORD_LENGTH} characters."
        )
    return value


def _check_prompts(value: Any, info: ValidationInfo) -> list[str] | list[list[int]]:
    """Turn a prompt or a list of prompts, as text or token ids, into a list of prompts."""
    name = info.field_name
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise refusal(
            f"{name} must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids."
        )
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if len(value) > MAX_PROMPTS:
        raise refusal(f"{name} takes at most {MAX_PROMPTS} prompts.")
    if not value or (kinds <= {str, list} and not all(value)):
        raise refusal(f"{name} must not be empty.")
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in value)):
        return value
    raise refusal(f"{name} must hold either strings or whole-number token ids.")


def _check_texts(value: Any, info: ValidationInfo) -> list[str]:
    """Turn a text or a list of texts into a list of texts."""
    name = info.field_name
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise refusal(f"{name} must be a string or a list of strings.")
    if len(texts) > MAX_PROMPTS:
        raise refusal(f"{name} takes at most {MAX_PROMPTS} texts.")
    if not texts or not all(texts):
        raise refusal(f"{name} must not be empty.")
    return texts


def _some(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_PROMPTS}


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
Stop = Annotated[
    list[str],
    PlainValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_STRING,
                {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "maxProperties": MAX_TOKEN_IDS,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]

BadWords = Annotated[
    list[str],
    PlainValidator(_check_bad_words),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "string", "pattern": r"\S", "maxLength": MAX_BAD_WORD_LENGTH},
            "maxItems": MAX_BAD_WORDS,
        }
    ),
]

TokenIds = Annotated[
    list[int], WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
]

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_check_prompts),
    WithJsonSchema({"anyOf": [_TEXT, _some(_TEXT), _IDS, _some(_IDS)]}),
]
Texts = Annotated[
    list[str], PlainValidator(_check_texts), WithJsonSchema({"anyOf": [_TEXT, _some(_TEXT)]})
]
"""Those of a field that takes no token ids."""


def documented(default: Any, **limits: Any) -> Any:
    """A field whose `limits` are checked elsewhere."""
    return Field(default, json_schema_extra=limits)


Metadata = Annotated[dict[str, str], Field(max_length=64)]
"""What a client notes on a request that is kept."""

IGNORED = frozenset(
    {
        *("access_programs", "client_metadata", "metadata", "mm_processor_kwargs"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "session_id", "store", "user"),
    }
)
"""They label, store or speed up a request, or are for inputs that it doesn't have."""
UNSUPPORTED = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "repetition_detection": (),
}


FLEX = "flex"
"""The `service_tier` of requests that rank below all others."""
LIMITING_FIELDS = frozenset(
    {
        *("response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)


class GenerationFields(Strict):
    """Fields of both endpoints. `SamplingParams.verify` checks the ranges of sampling fields, which
    stand here only for the OpenAPI document."""

    ignored: ClassVar[frozenset[str]] = IGNORED - {"store"}

    model: str = ""
    """Of the model or an adapter; left out: the first that is served."""
    n: int = documented(1, minimum=1, maximum=MAX_N)
    max_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    min_tokens: int = documented(0, minimum=0, maximum=_MAX_INT)
    temperature: float = documented(1.0, minimum=0, maximum=100)
    top_p: float = documented(1.0, exclusiveMinimum=0, maximum=1)
    top_k: int = documented(-1, minimum=-1, maximum=_MAX_INT)
    min_p: float = documented(0.0, minimum=0, maximum=1)
    seed: int | None = documented(None, minimum=-(2**63), maximum=2**63 - 1)
    stop: Stop = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(
        default_factory=list, json_schema_extra={"maxItems": MAX_TOKEN_IDS}
    )
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    presence_penalty: float = documented(0.0, minimum=-2, maximum=2)
    frequency_penalty: float = documented(0.0, minimum=-2, maximum=2)
    repetition_penalty: float = documented(1.0, minimum=0.01, maximum=100)
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = documented(None, minItems=1)
    bad_words: BadWords = Field(default_factory=list)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    truncation_side: Literal["left", "right"] = "left"
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = documented(None, minimum=0, maximum=MAX_LOGPROBS)
    logprob_token_ids: TokenIds | None = documented(None, minItems=1, maxItems=MAX_LISTED_TOKENS)
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stream_interval: int = Field(1, ge=1, le=_MAX_INT)
    priority: int = Field(0, ge=-_MAX_INT, le=_MAX_INT)
    cache_salt: str = Field("", min_length=1, max_length=1024)
    return_token_ids: bool = False
    request_id: str = Field("", max_length=128, pattern=r"^[!-~]*$")
    service_tier: str | None = None
    """"flex": in what others leave. Other tiers make no difference."""
    store: bool | None = None
    """False: the request isn't kept, so that its stream can't be read on."""

    @model_validator(mode="after")
    def _check_stream(self) -> "GenerationFields":
        if not self.stream and "stream_options" in self.model_fields_set:
            raise refusal("stream_options is only allowed with stream: true.", "stream_options")
        if self.truncate_prompt_tokens == 0:
            raise refusal(
                "truncate_prompt_tokens must be -1 or at least 1.", "truncate_prompt_tokens"
            )
        if self.logprob_token_ids is not None and not self.wants_logprobs:
            raise refusal("logprob_token_ids is only allowed with logprobs.", "logprob_token_ids")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply has log-probabilities of the output."""
        raise NotImplementedError

    def logprob_style(self, num_top: int) -> LogprobStyle:
        """How the reply shows `num_top` alternatives."""
        listed = self.logprob_token_ids is not None
        return LogprobStyle(num_top, listed, self.return_tokens_as_token_ids)

    def common(
        self, request_id: str, logprobs: int | None, prompt_logprobs: int | None, info: ModelInfo
    ) -> dict[str, Any]:
        """Fields of the `GenerationRequest` that this stands for. `request_id` has the prefix of
        the API. Raises `RequestError`."""
        truncation = None
        if self.truncate_prompt_tokens is not None:
            truncation = Truncation(self.truncate_prompt_tokens, self.truncation_side)
        return {
            "id": request_id,
            "model": self.model,
            "given_id": request_id.partition("-")[2],
            "params": self.sampling_params(logprobs, prompt_logprobs, info.sampling_defaults),
            "delivery": Delivery(self.stream, self.stream_interval, self.return_token_ids),
            "truncation": truncation,
            "bad_words": self.bad_words,
            "constraint": self._constraint(),
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "is_flex": self.service_tier == FLEX,
        }

    def _constraint(self) -> NamedConstraint | None:
        """What the output must be."""
        if LIMITING_FIELDS.isdisjoint(self.model_fields_set):
            return None
        given = (
            self.response_format,
            self.structured_outputs,
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
        )
        spec = constraint_spec(*given)
        return None if spec is None else NamedConstraint(spec, constraint_field(*given))

    def sampling_params(
        self, logprobs: int | None, prompt_logprobs: int | None, defaults: Mapping[str, float]
    ) -> SamplingParams:
        """Parameters of the `n` copies of one prompt. `defaults`: as in `sampling_params`."""
        return sampling_params(
            self,
            defaults,
            # As in vLLM, listed tokens take the place of the likeliest.
            logprobs=logprobs if self.logprob_token_ids is None else 0,
            prompt_logprobs=prompt_logprobs,
            logprob_token_ids=self.logprob_token_ids,
        )
