"""Open WebUI's backend: its router, over chats and over responses, without its pages and stores."""

import os

os.environ["DATA_DIR"] = os.environ["HOME"]
os.environ["WEBUI_SECRET_KEY"] = "none"
os.environ["OFFLINE_MODE"] = "true"
os.environ["FROM_INIT_PY"] = "true"

from fastapi import FastAPI
from fastapi.testclient import TestClient
from open_webui.models.config import Config
from open_webui.models.users import UserModel
from open_webui.routers import openai
from open_webui.utils.auth import get_admin_user, get_verified_user
from open_webui.utils.payload import apply_params_to_form_data
from starlette.requests import Request

URL = os.environ["BASE_URL"] + "/v1"
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
PARAMS = {"temperature": 0.5, "max_tokens": 100, "top_p": 0.9, "function_calling": "native"}

user = UserModel(
    id="u",
    name="Ann",
    email="ann@example.com",
    role="admin",
    profile_image_url="",
    last_active_at=0,
    updated_at=0,
    created_at=0,
)
app = FastAPI()
app.state.OPENAI_MODELS = {}
for who in (get_verified_user, get_admin_user):
    app.dependency_overrides[who] = lambda: user


@app.post("/connect")
async def connect(config: dict) -> None:
    await Config.upsert(
        {
            "openai.enable": True,
            "openai.api_base_urls": [URL],
            "openai.api_keys": ["none"],
            "openai.api_configs": {"0": config},
        }
    )


@app.post("/embed")
async def embed(texts: list[str]) -> None:
    request = Request({"type": "http", "app": app, "headers": []})
    await openai.embeddings(request, {"model": "fake", "input": texts}, user)


# Last, because it takes every path.
app.include_router(openai.router)
with TestClient(app) as client:

    def ask(**fields: object) -> object:
        form = {"model": "fake", "params": dict(PARAMS), **fields}
        form["metadata"] = {"chat_id": "c", "message_id": "m", "session_id": "s"}
        reply = client.post("/chat/completions", json=apply_params_to_form_data(form, {}))
        assert reply.status_code == 200, reply.text
        return reply.text if fields.get("stream") else reply.json()

    for config in ({}, {"api_type": "responses"}):
        assert client.post("/connect", json=config).status_code == 200
        assert client.get("/models/0").json()["data"]
        usage = {"include_usage": True}
        system = {"role": "system", "content": "Be brief."}
        ask(messages=[system, QUESTION], stream=True, stream_options=usage)
        ask(messages=[QUESTION], stream=True, stream_options=usage, tools=[TOOL])
        call = {
            "id": "call_12345678",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            "index": 0,
        }
        history = [
            QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_12345678", "content": "Sunny."},
        ]
        ask(messages=history, stream=True, stream_options=usage, tools=[TOOL])
        # The title of a chat.
        ask(messages=[QUESTION], stream=False, max_completion_tokens=50)
    assert client.post("/embed", json=["one", "two"]).status_code == 200
