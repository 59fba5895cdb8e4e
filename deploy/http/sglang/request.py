"""Body of `POST /generate`."""

# No `from __future__ import annotations`: pydantic reads the annotations of these classes.
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from deploy.http.body import Strict, refusal
from deploy.http.generation.request import Delivery, FieldNames, TextRequest, Wanted
from deploy.http.sglang.sampling import DEFAULT_MAX_NEW_TOKENS, SamplingFields, TokenIds
from engine.protocol.sampling_params import MAX_LISTED_TOKENS, MAX_LOGPROBS, SamplingParams

T = TypeVar("T")

MAX_SEQUENCES = 2048
_MAX_INT = 2**31 - 1

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}


def _check_text(value: Any) -> list[str] | str:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(text) is str and text for text in value):
        return value
    raise refusal("text must be a string or a list of strings, none of them empty.")


def _check_ids(value: Any) -> list[int] | list[list[int]]:
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if kinds == {int}:
        return value  # type: ignore[no-any-return]
    if kinds == {list} and all(set(map(type, ids)) == {int} for ids in value):
        return value  # type: ignore[no-any-return]
    raise refusal("input_ids must be a list of token ids, or a list of such lists, none empty.")


def _one_or_list(item: dict[str, Any]) -> WithJsonSchema:
    several = {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_SEQUENCES}
    return WithJsonSchema({"anyOf": [item, several]})


Text = Annotated[str | list[str], PlainValidator(_check_text), _one_or_list(_TEXT)]
InputIds = Annotated[list[int] | list[list[int]], PlainValidator(_check_ids), _one_or_list(_IDS)]
StartLen = Annotated[int, Field(ge=-1, le=_MAX_INT)]
NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
ListedTokens = Annotated[TokenIds, Field(max_length=MAX_LISTED_TOKENS)]
Rid = Annotated[str, Field(max_length=256, pattern="^[!-~]+$")]


class LogprobFields(NamedTuple):
    """What one prompt's reply has of log-probabilities."""

    wanted: bool
    start: int
    """Index of the first token of the prompt that has any; -1: none has."""
    num_top: int
    listed: list[int]

    @property
    def of_prompt(self) -> bool:
        """Whether tokens of the prompt have any."""
        return self.wanted and self.start >= 0


class GenerateFields(Strict):
    """Body of `POST /generate`. Lists have one entry for each prompt."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]}
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "input_embeds": (),
        "image_data": ([], ""),
        "video_data": ([], ""),
        "audio_data": ([], ""),
        "lora_id": ("",),
        "session_params": ({},),
        "custom_logit_processor": ("",),
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "return_bytes": (False,),
        "return_entropy": (False,),
        "require_reasoning": (False,),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "bootstrap_pair_key": (),
        "data_parallel_rank": (),
        "background": (False,),
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"conversation_id", "log_metrics", "modalities", "stream_options"}
    )

    text: Text | None = None
    input_ids: InputIds | None = None
    sampling_params: SamplingFields | list[SamplingFields] = Field(
        default_factory=lambda: SamplingFields.model_validate({})
    )
    rid: Rid | list[Rid] | None = None
    """What the request can be aborted by, and `meta_info.id`."""
    return_logprob: bool | list[bool] = False
    logprob_start_len: StartLen | list[StartLen] = -1
    top_logprobs_num: NumTop | list[NumTop] = 0
    token_ids_logprob: ListedTokens | list[ListedTokens] = Field(default_factory=list)
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: int = Field(0, ge=-_MAX_INT, le=_MAX_INT)
    """A higher number is served sooner."""
    lora_path: str = Field("", max_length=256)
    """Name of an adapter."""
    extra_key: str = Field("", max_length=1024)
    """Cached prefixes are shared only between requests with the same key."""

    @model_validator(mode="after")
    def _check(self) -> "GenerateFields":
        if (self.text is None) == (self.input_ids is None):
            raise refusal("Give either text or input_ids.", "text")
        if len({(fields.n, fields.stream_interval) for fields in self.each_sampling}) > 1:
            raise refusal(
                "n and stream_interval must be the same for all prompts.", "sampling_params"
            )
        if self.n * len(self.prompts) > MAX_SEQUENCES:
            raise refusal(f"n times prompts must not exceed {MAX_SEQUENCES}.", "sampling_params")
        for logprobs in self.each_logprobs:
            if logprobs.listed and logprobs.of_prompt:
                raise refusal(
                    "token_ids_logprob is for output tokens only: leave logprob_start_len at -1.",
                    "token_ids_logprob",
                )
        self.rids("")
        return self

    @property
    def is_batch(self) -> bool:
        """Whether several prompts can be given, so that the reply is a list."""
        first = self.text if self.input_ids is None else self.input_ids[0]
        return isinstance(first, list)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts."""
        given: Any = self.text if self.input_ids is None else self.input_ids
        return given if self.is_batch else [given]

    @property
    def n(self) -> int:
        """Copies of each prompt."""
        return self.each_sampling[0].n

    @cached_property
    def each_sampling(self) -> list[SamplingFields]:
        """`sampling_params` by prompt."""
        return self._each("sampling_params", self.sampling_params)

    @cached_property
    def each_logprobs(self) -> list[LogprobFields]:
        """What is wanted of log-probabilities, by prompt."""
        listed: Any = self.token_ids_logprob
        if not listed or not isinstance(listed[0], list):
            listed = [listed] * len(self.prompts)
        columns: list[list[Any]] = [
            self._each("return_logprob", self.return_logprob),
            self._each("logprob_start_len", self.logprob_start_len),
            self._each("top_logprobs_num", self.top_logprobs_num),
            self._each("token_ids_logprob", listed),
        ]
        return [LogprobFields(*row) for row in zip(*columns, strict=True)]

    def rids(self, fallback: str) -> list[str]:
        """Ids by prompt; `fallback` if the request has none."""
        if isinstance(self.rid, list):
            return self._each("rid", self.rid)
        rid = self.rid or fallback
        return [f"{rid}_{i}" for i in range(len(self.prompts))] if self.is_batch else [rid]

    def translate(self, request_id: str) -> TextRequest:
        """The request that this stands for. Raises `RequestError`."""
        each = [
            _wanted(fields, logprobs, rid)
            for fields, logprobs, rid in zip(
                self.each_sampling, self.each_logprobs, self.rids(request_id), strict=True
            )
        ]
        prompt = "text" if self.input_ids is None else "input_ids"
        return TextRequest(
            id=self.rid if isinstance(self.rid, str) else request_id,
            params=each[0].params,
            max_tokens=None,
            default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
            names=FieldNames(prompt, "max_new_tokens"),
            delivery=Delivery(self.stream, self.each_sampling[0].stream_interval),
            priority=-self.priority,
            model=self.lora_path,
            cache_salt=self.extra_key,
            prompts=self.prompts,
            each=each,
        )

    def _each(self, name: str, value: T | list[T]) -> list[T]:
        """A field's values by prompt."""
        count = len(self.prompts)
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count:
            raise refusal(f"{name} has {len(value)} entries for {count} prompts.", name)
        return value


def _wanted(fields: SamplingFields, logprobs: LogprobFields, rid: str) -> Wanted:
    params: SamplingParams = fields.translate(
        logprobs=logprobs.num_top if logprobs.wanted else None,
        prompt_logprobs=logprobs.num_top if logprobs.of_prompt else None,
        logprob_token_ids=logprobs.listed if logprobs.wanted and logprobs.listed else None,
    )
    # A sequence always makes a token; with `max_new_tokens` 0 it is dropped again.
    most = fields.max_new_tokens
    return Wanted(params, 1 if most == 0 else most, fields.constraint(), rid)
