"""Request bodies of the generating endpoints: from bytes to checked fields."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.errors import RequestError
from engine.sampling_params import MAX_N, SamplingParams

_MAX_INT = 2**31 - 1
M = TypeVar("M", bound=BaseModel)

_SENTENCES = {
    "missing": "You must provide {param}.",
    "extra_forbidden": "Unrecognized request argument supplied: {param}",
}


def parse_request(body: bytes, kind: type[M]) -> M:
    """Decode and check a request. Raises `RequestError` naming the field, or the place in JSON."""
    data = decode_json(body)
    if not isinstance(data, dict):
        raise RequestError("The request body must be a JSON object.")
    try:
        return kind.model_validate(data)
    except ValidationError as exception:
        raise _first_error(exception) from None


def decode_json(body: bytes) -> Any:
    """The value of a JSON text. Raises `RequestError` saying where it is broken."""
    if not body.strip():
        raise RequestError("The request body is empty; it must be a JSON object.")
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as exception:
        raise _broken_json(body, str(exception)) from None


def _broken_json(body: bytes, reason: str) -> RequestError:
    """Explain what msgspec refused. The standard library's parser is slower but says where.

    That parser also reads NaN, Infinity and 1e999, which aren't JSON, so that the field can be
    named.
    """
    try:
        value = json.loads(body.decode())
    except json.JSONDecodeError as exception:
        return RequestError(
            f"The request body is not valid JSON: {exception.msg} at line {exception.lineno}, "
            f"column {exception.colno}."
        )
    except UnicodeDecodeError as exception:
        return RequestError(f"The request body is not UTF-8 at byte {exception.start}.")
    except RecursionError:
        return RequestError("The request body is nested too deeply.")
    except ValueError:
        return RequestError("The request body has an integer of too many digits.")
    path = _find_non_finite(value, ())
    if path is not None:
        return RequestError(f"{_param(path)} must be a finite number.", _param(path))
    return RequestError(f"The request body is not valid JSON: {reason}.")


def _find_non_finite(value: Any, path: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return None
    for key, item in items:
        found = _find_non_finite(item, (*path, key))
        if found is not None:
            return found
    return None


def _first_error(exception: ValidationError) -> RequestError:
    error = exception.errors(include_url=False, include_input=False)[0]
    path, kind = error["loc"], error["type"]
    if kind == "refused":
        context = error["ctx"]
        if context["field"]:
            path = (*path, context["field"])
        return RequestError(context["message"], _param(path), code=context["code"] or None)
    param = _param(path)
    message = error["msg"][:1].lower() + error["msg"][1:]
    sentence = _SENTENCES.get(kind, "Invalid value for {param}: {message}.")
    return RequestError(
        sentence.format(param=param, message=message),
        param,
        code="unknown_parameter" if kind == "extra_forbidden" else None,
    )


def _param(path: tuple[str | int, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text[:200]


def refusal(message: str, field: str = "", code: str = "") -> PydanticCustomError:
    """Error of a validator. `field` names a field below the one that the validator checks."""
    context = {"message": message, "field": field, "code": code}
    return PydanticCustomError("refused", "{message}", context)


class Strict(BaseModel):
    """A JSON object whose types are taken literally: no number from a string, no int from true.

    null means "not given", as OpenAI's clients send it. Undeclared names are refused. Names in
    `unsupported` are fields of OpenAI's or vLLM's API that Manta doesn't have: they pass only with
    a value that switches them off, else they are refused by name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {}
        for name, value in data.items():
            if value is None:
                continue
            if name not in cls.unsupported:
                given[name] = value
            elif not any(
                type(value) is type(off) and value == off for off in cls.unsupported[name]
            ):
                value_too = " with this value" if cls.unsupported[name] else ""
                raise refusal(
                    f"{name} is not supported yet{value_too}.", name, "unsupported_parameter"
                )
        return given


class StreamOptions(Strict):
    """`include_usage`: a last chunk holds the usage; `continuous_usage_stats`: every chunk does."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Padding against traffic analysis, a choice of OpenAI's servers; accepted, never added."""


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
            raise refusal("logit_bias has a key that is not a token id.")
        if type(number) not in (int, float) or not abs(number) <= 100:
            raise refusal(f"logit_bias of token {token} must be a number from -100 to 100.")
        bias[token] = float(number)
    return bias


Stop = Annotated[
    list[str],
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_check_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]

UNSUPPORTED = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "bad_words": ([],),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "repetition_detection": (),
    "stream_interval": (1,),
    "prompt_cache_options": (),
}


class GenerationRequest(Strict):
    """Fields of both endpoints. `SamplingParams.verify` checks the ranges of sampling fields."""

    model: str = ""
    """May be left out: only one model is served."""
    n: int = Field(1, json_schema_extra={"minimum": 1, "maximum": MAX_N})
    max_tokens: int | None = Field(None, ge=0, le=_MAX_INT)
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: LogitBias | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    priority: int = Field(0, ge=-_MAX_INT, le=_MAX_INT)
    cache_salt: str = Field("", max_length=1024)
    return_token_ids: bool = False
    request_id: str = Field("", max_length=128, pattern=r"^[!-~]*$")

    # Accepted: they label, store or speed up a request and don't change what is generated.
    user: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    session_id: str = ""

    @model_validator(mode="after")
    def _check_stream(self) -> "GenerationRequest":
        if not self.stream and "stream_options" in self.model_fields_set:
            raise refusal("stream_options is only allowed with stream: true.", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise refusal("prompt_logprobs is only allowed without streaming.", "prompt_logprobs")
        return self

    def sampling_params(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Parameters of the `n` copies of one prompt."""
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
