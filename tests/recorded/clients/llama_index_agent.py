"""LlamaIndex: an agent, streams, structured answers and embeddings."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
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


async def main() -> None:
    common = {"model": "fake", "api_base": f"{URL}/v1", "api_key": "none"}
    chat = OpenAILike(
        **common, is_chat_model=True, is_function_calling_model=True, context_window=10_000
    )
    await FunctionAgent(tools=[weather], llm=chat, system_prompt="Be brief.").run(QUESTION)
    for _ in chat.stream_chat([ChatMessage(role="user", content=QUESTION)]):
        pass
    assert chat.as_structured_llm(City).complete(QUESTION)
    OpenAILike(**common, is_chat_model=False).complete("Once")
    embedding = OpenAILikeEmbedding(model_name="fake", api_base=f"{URL}/v1", api_key="none")
    embedding.get_text_embedding_batch(["one", "two"])


asyncio.run(main())
