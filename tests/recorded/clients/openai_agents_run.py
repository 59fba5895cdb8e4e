"""openai-agents: a run with a tool, a handoff and a structured answer, by responses and chats."""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    people: int


@function_tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"Sunny in {city}."


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1")
    question = "What is the weather in Paris?"
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model="fake", openai_client=client)
        agent = Agent(name="Teller", instructions="Be brief.", model=model, tools=[weather])
        first = await Runner.run(agent, question)
        follow = [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}]
        await Runner.run(agent, follow)
        stream = Runner.run_streamed(agent, question)
        async for _ in stream.stream_events():
            pass
        await Runner.run(Agent(name="Asker", model=model, output_type=City), question)
        await Runner.run(Agent(name="Desk", model=model, handoffs=[agent]), question)


asyncio.run(main())
