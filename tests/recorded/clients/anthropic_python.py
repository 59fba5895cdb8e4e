"""Anthropic's Python client: messages, its tool runner, token counts, models."""

import os

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

client = Anthropic(base_url=os.environ["BASE_URL"])
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


class City(BaseModel):
    name: str
    people: int


@beta_tool
def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: Where.
    """
    return f"Sunny in {city}."


client.models.list()
client.models.retrieve("fake")
client.messages.count_tokens(model="fake", messages=QUESTION, tools=[TOOL], system="Be brief.")
reply = client.messages.create(model="fake", max_tokens=500, messages=QUESTION, tools=[TOOL])
call = next(block for block in reply.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
history = [
    *QUESTION,
    {"role": "assistant", "content": reply.content},
    {"role": "user", "content": [result]},
]
client.messages.create(model="fake", max_tokens=500, messages=history, tools=[TOOL])
with client.messages.stream(
    model="fake",
    max_tokens=5000,
    messages=QUESTION,
    system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    tools=[TOOL | {"cache_control": {"type": "ephemeral"}}],
    tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    thinking={"type": "enabled", "budget_tokens": 1024},
    metadata={"user_id": "u"},
    stop_sequences=["END"],
) as stream:
    stream.until_done()
client.messages.create(
    model="fake", max_tokens=500, messages=QUESTION, tools=[TOOL], tool_choice={"type": "any"}
)
parsed = client.messages.parse(model="fake", max_tokens=500, messages=QUESTION, output_format=City)
assert parsed.parsed_output
client.beta.messages.create(
    model="fake",
    max_tokens=500,
    messages=QUESTION,
    betas=["context-management-2025-06-27"],
    context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
)
for streamed in (False, True):
    runner = client.beta.messages.tool_runner(
        model="fake", max_tokens=500, messages=QUESTION, tools=[weather], stream=streamed
    )
    runner.until_done()
