"""`POST /v1/embeddings`."""

# No `from __future__ import annotations`: pydantic reads the annotations of the request.
import base64
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from deploy.http.body import Strict, encode_json, refusal
from deploy.http.engine_client import EngineClient
from deploy.http.generation.embedding import EmbeddingGeneration
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation
from deploy.http.generation.plan import Plan, plan_texts
from deploy.http.generation.request import Delivery, FieldNames, Incoming, TextRequest, Truncation
from deploy.http.openai.generation import usage
from deploy.http.openai.replies import Embeddings
from deploy.http.openai.request import Prompts, documented
from deploy.options import ServerOptions
from engine.protocol.pooling import FloatArray, Pooling, check_dimensions
from engine.protocol.sampling_params import SamplingParams

_MAX_INT = 2**31 - 1


class PooledFields(Strict):
    """Fields of all routes that embed."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "mm_processor_kwargs": (),
        "use_activation": (True,),
        "padding": ("do_not_pad",),
    }

    model: str = ""
    """Of the model or an adapter; left out: the first that is served."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_MAX_INT)
    truncation_side: Literal["left", "right"] = "left"
    add_special_tokens: bool = True
    priority: int = Field(0, ge=-_MAX_INT, le=_MAX_INT)
    cache_salt: str = Field("", min_length=1, max_length=1024)
    request_id: str = Field("", max_length=128, pattern=r"^[!-~]*$")
    user: str = ""
    """Accepted: it labels a request."""

    @model_validator(mode="after")
    def _check_truncation(self) -> "PooledFields":
        if self.truncate_prompt_tokens == 0:
            raise refusal(
                "truncate_prompt_tokens must be -1 or at least 1.", "truncate_prompt_tokens"
            )
        return self

    async def plan(
        self,
        client: EngineClient,
        server: ServerOptions,
        prompts: list[str] | list[list[int]],
        name: str,
        request_id: str,
        incoming: Incoming,
    ) -> Plan:
        """The plan that embeds the prompts of the field `name`. Raises `RequestError`."""
        info = client.model_info
        truncation = None
        if self.truncate_prompt_tokens is not None:
            truncation = Truncation(self.truncate_prompt_tokens, self.truncation_side)
        pooling: Pooling = info.resolved.pooling
        request = TextRequest(
            id=request_id,
            model=self.model,
            given_id=request_id.partition("-")[2],
            params=SamplingParams(temperature=0.0),
            max_tokens=0,
            names=FieldNames(name, name),
            delivery=Delivery(stream=False),
            truncation=truncation,
            priority=self.priority,
            cache_salt=self.cache_salt,
            pooling=pooling,
            prompts=prompts,
            add_special_tokens=self.add_special_tokens,
        )
        return await plan_texts(client, server, request, incoming)


class EmbeddingRequest(PooledFields):
    """Body of `POST /v1/embeddings`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PooledFields.unsupported,
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = documented(None, minimum=1)
    normalize: bool = True


class EmbeddingEndpoint(Endpoint):
    """Embeds prompts, which are texts or token ids."""

    name = "embeddings"
    paths = ("/v1/embeddings",)
    description = "As OpenAI's `POST /v1/embeddings`, with the fields below."
    body = EmbeddingRequest
    reply = Embeddings

    async def prepare(
        self,
        client: EngineClient,
        fields: EmbeddingRequest,
        incoming: Incoming,
    ) -> Generation[Any]:
        request_id = f"embd-{fields.request_id or incoming.id}"
        check_dimensions(fields.dimensions, client.model_info.resolved.model.hidden_size)
        plan = await fields.plan(
            client, self.settings.server, fields.input, "input", request_id, incoming
        )
        return EmbeddingsReply(
            client, fields, plan, incoming.tracker, fields.dimensions, normalize=fields.normalize
        )


class EmbeddingsReply(EmbeddingGeneration[EmbeddingRequest]):
    """Each vector is encoded when it comes, so that the last one leaves little to do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._items = [b""] * len(self._outputs)

    def _take(self, index: int, embedding: FloatArray) -> None:
        value: Any = embedding.tolist()
        if self._request.encoding_format == "base64":
            value = base64.b64encode(embedding.astype("<f4").tobytes()).decode()
        item = {"object": "embedding", "index": index, "embedding": value}
        self._items[index] = encode_json(item)

    def _reply(self) -> bytes:
        plan = self._plan
        rest = {
            "id": plan.request.id,
            "created": plan.created,
            "model": plan.model,
            "usage": usage(self._num_prompt, 0, self._num_cached),
        }
        items = b",".join(self._items)
        return b'{"object":"list","data":[' + items + b"]," + encode_json(rest)[1:]
