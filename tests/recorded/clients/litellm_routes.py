"""LiteLLM: its routes to OpenAI-compatible servers, vLLM and Anthropic."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel

URL = os.environ["BASE_URL"]
ROUTES = {"openai/fake": f"{URL}/v1", "hosted_vllm/fake": f"{URL}/v1", "anthropic/fake": URL}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class City(BaseModel):
    name: str
    people: int


litellm.telemetry = False
for model, url in ROUTES.items():
    common = {"model": model, "api_base": url, "api_key": "none"}
    reply = litellm.completion(**common, messages=[QUESTION], tools=[TOOL], tool_choice="auto")
    message = reply.choices[0].message
    call = message.tool_calls[0]
    json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "Sunny."}
    history = [QUESTION, message.model_dump(), result]
    litellm.completion(**common, messages=history, tools=[TOOL], max_tokens=100, temperature=0.5)
    chunks = litellm.completion(
        **common, messages=[QUESTION], stream=True, stream_options={"include_usage": True}
    )
    for _ in chunks:
        pass
    litellm.completion(**common, messages=[QUESTION], response_format=City)
    litellm.completion(**common, messages=[QUESTION], reasoning_effort="low", drop_params=True)
litellm.responses(model="openai/fake", api_base=f"{URL}/v1", api_key="none", input="Hello.")
litellm.text_completion(
    model="text-completion-openai/fake", api_base=f"{URL}/v1", api_key="none", prompt="Once"
)
litellm.embedding(model="openai/fake", api_base=f"{URL}/v1", api_key="none", input=["one"])
