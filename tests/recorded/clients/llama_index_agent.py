"""LlamaIndex: an agent, streams, structured answers and embeddings."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = os.environ["BASE_URL"]
QUESTION = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    name: str
    people: int


def weather(city: str) -> str:
    """Tells the weather."""
    return f"Sunny in {city}."


class LocalAnthropic(Anthropic):
    """Its own class asks the name of the model for the size of the context."""

    @property
    def metadata(self):
        from llama_index.core.base.llms.types import LLMMetadata

        return LLMMetadata(
            context_window=10_000,
            is_chat_model=True,
            model_name="fake",
            is_function_calling_model=True,
        )


async def main() -> None:
    common = {"model": "fake", "api_base": f"{URL}/v1", "api_key": "none"}
    chat = OpenAILike(
        **common, is_chat_model=True, is_function_calling_model=True, context_window=10_000
    )
    for model in (chat, LocalAnthropic(model="fake", base_url=URL, api_key="none")):
        await FunctionAgent(tools=[weather], llm=model, system_prompt="Be brief.").run(QUESTION)
        for _ in model.stream_chat([ChatMessage(role="user", content=QUESTION)]):
            pass
    assert chat.as_structured_llm(City).complete(QUESTION)
    OpenAILike(**common, is_chat_model=False).complete("Once")
    embedding = OpenAILikeEmbedding(model_name="fake", api_base=f"{URL}/v1", api_key="none")
    embedding.get_text_embedding_batch(["one", "two"])


asyncio.run(main())
