"""instructor: a model of pydantic by tools and by JSON, from chats and messages."""

import os

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

URL = os.environ["BASE_URL"]
QUESTION = [{"role": "user", "content": "Which city?"}]


class City(BaseModel):
    """A city."""

    name: str
    people: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    chat = instructor.from_openai(OpenAI(base_url=f"{URL}/v1"), mode=mode)
    chat.chat.completions.create(
        model="fake", messages=QUESTION, response_model=City, max_retries=1
    )
    for _ in chat.chat.completions.create_partial(
        model="fake", messages=QUESTION, response_model=City, max_retries=1
    ):
        pass
messages = instructor.from_anthropic(Anthropic(base_url=URL))
messages.messages.create(
    model="fake", max_tokens=500, messages=QUESTION, response_model=City, max_retries=1
)
