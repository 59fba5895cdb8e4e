"""pydantic-ai: agents with a tool and with a structured answer, by three kinds of models."""

import asyncio
import os

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

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
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    messages = AsyncAnthropic(base_url=URL, api_key="none")
    for model in (
        OpenAIChatModel("fake", provider=provider),
        OpenAIResponsesModel("fake", provider=provider),
        AnthropicModel("fake", provider=AnthropicProvider(anthropic_client=messages)),
    ):
        agent = Agent(model, instructions="Be brief.", tools=[weather])
        first = await agent.run(QUESTION)
        await agent.run("And in Rome?", message_history=first.all_messages())
        async with agent.run_stream(QUESTION) as stream:
            async for _ in stream.stream_text():
                pass
        await Agent(model, output_type=City).run(QUESTION)
        if not isinstance(model, AnthropicModel):
            await Agent(model, output_type=NativeOutput(City)).run(QUESTION)


asyncio.run(main())
