"""`POST /generate`."""

from __future__ import annotations

from typing import Any

from deploy.http.engine_client import EngineClient
from deploy.http.generation.endpoint import Endpoint
from deploy.http.generation.generation import Generation
from deploy.http.generation.plan import Plan, plan_texts
from deploy.http.generation.read_on import ForgetRoute, ReadOnRoute
from deploy.http.generation.request import Incoming
from deploy.http.sglang.generation import GenerateGeneration
from deploy.http.sglang.replies import GeneratedChunk, GenerateReply, SGLangError
from deploy.http.sglang.request import GenerateFields
from engine.errors import RequestError


class GenerateEndpoint(Endpoint):
    """Continues prompts, each with sampling parameters of its own if the request says so."""

    name = "generate"
    paths = ("/generate",)
    description = "As SGLang's `POST /generate`, with the fields below."
    body = GenerateFields
    reply = GenerateReply
    events = (GeneratedChunk, SGLangError)
    done = "[DONE]"

    def model_named(self, given: GenerateFields) -> str:
        return given.lora_path

    async def prepare(
        self,
        client: EngineClient,
        given: GenerateFields,
        incoming: Incoming,
    ) -> Generation[Any]:
        plan = await plan_texts(
            client, self.settings.server, given.translate(incoming.id), incoming
        )
        firsts = await _first_tokens(client, given, plan)
        return GenerateGeneration(client, given, plan, incoming.tracker, firsts)


class ReadGenerateRoute(ReadOnRoute):
    """`GET /generate/{record_id}`."""

    endpoint = GenerateEndpoint


class ForgetGenerateRoute(ForgetRoute):
    """`DELETE /generate/{record_id}`."""

    endpoint = GenerateEndpoint
    object_name = "generation"


async def _first_tokens(client: EngineClient, given: GenerateFields, plan: Plan) -> list[str]:
    """The text of each prompt's first token, if it is wanted. Raises `RequestError` if
    log-probabilities are wanted from behind a prompt's end on."""
    prompts = [sequence.prompt_ids.tolist() for sequence in plan.sequences[:: plan.n]]
    for ids, logprobs in zip(prompts, given.each_logprobs, strict=True):
        if logprobs.of_prompt and logprobs.start >= len(ids):
            raise RequestError(
                f"logprob_start_len ({logprobs.start}) must be below the number of prompt tokens "
                f"({len(ids)}).",
                "logprob_start_len",
            )
    if not given.return_text_in_logprobs or not any(f.of_prompt for f in given.each_logprobs):
        return []
    return await client.decode_each([ids[0] for ids in prompts])
