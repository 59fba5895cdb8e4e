"""OpenAI's Python client: chats, completions, responses, embeddings, models."""

import os

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=os.environ["BASE_URL"] + "/v1")
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city."}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}
CUSTOM = {"type": "custom", "custom": {"name": "note", "description": "Takes a text."}}


class City(BaseModel):
    name: str
    people: int | None


client.models.list()
client.models.retrieve("fake")
client.completions.create(model="fake", prompt="Once", max_tokens=8)
for _ in client.completions.create(model="fake", prompt=["a", "b"], max_tokens=8, stream=True):
    pass

# A chat with a tool, whole and streamed.
reply = client.chat.completions.create(model="fake", messages=QUESTION, tools=[TOOL, CUSTOM])
message = reply.choices[0].message
assert message.tool_calls, reply
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
client.chat.completions.create(model="fake", messages=[*QUESTION, message, result], tools=[TOOL])
with client.chat.completions.stream(
    model="fake", messages=QUESTION, tools=[TOOL], stream_options={"include_usage": True}
) as stream:
    stream.until_done()
    assert stream.get_final_completion().choices[0].message.tool_calls
forced = {"type": "function", "function": {"name": "weather"}}
client.chat.completions.create(
    model="fake", messages=QUESTION, tools=[TOOL], tool_choice=forced, parallel_tool_calls=False
)
client.chat.completions.create(
    model="fake",
    messages=[
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}], "name": "ann"},
    ],
    max_completion_tokens=50,
    logprobs=True,
    top_logprobs=2,
    store=False,
    metadata={"a": "b"},
    service_tier="auto",
    reasoning_effort="low",
    user="u",
)
assert (
    client.chat.completions.parse(model="fake", messages=QUESTION, response_format=City)
    .choices[0]
    .message.parsed
)

# Responses.
tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
response = client.responses.create(
    model="fake", input="Weather?", tools=[tool, {"type": "custom", "name": "note"}], store=False
)
call = next(item for item in response.output if item.type == "function_call")
output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
history = [{"role": "user", "content": "Weather?"}, *response.output, output]
client.responses.create(model="fake", input=history, tools=[tool], store=False)
with client.responses.stream(
    model="fake",
    input="Weather?",
    instructions="Be brief.",
    reasoning={"effort": "low", "summary": "auto"},
    include=["reasoning.encrypted_content"],
) as events:
    events.until_done()
assert client.responses.parse(model="fake", input="City?", text_format=City).output_parsed
client.responses.input_tokens.count(model="fake", input="Hello.")

client.embeddings.create(model="fake", input=["one", "two"])
client.embeddings.create(model="fake", input="one", encoding_format="float")
