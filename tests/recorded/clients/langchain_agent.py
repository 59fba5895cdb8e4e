"""LangChain: an agent, streams and structured answers over chats, responses and messages."""

import os

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = os.environ["BASE_URL"]
QUESTION = "What is the weather in Paris?"


class City(BaseModel):
    """A city."""

    name: str
    people: int


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"Sunny in {city}."


models = [
    ChatOpenAI(model="fake", base_url=f"{URL}/v1", temperature=0.5),
    ChatOpenAI(model="fake", base_url=f"{URL}/v1", use_responses_api=True),
    ChatAnthropic(model="fake", base_url=URL, max_tokens=500),
]
for model in models:
    agent = create_agent(model, tools=[weather], system_prompt="Be brief.")
    request = {"messages": [{"role": "user", "content": QUESTION}]}
    assert len(agent.invoke(request)["messages"]) == 4
    for _ in agent.stream(request, stream_mode="messages"):
        pass
    assert isinstance(model.with_structured_output(City).invoke(QUESTION), City)
models[0].with_structured_output(City, method="function_calling").invoke(QUESTION)
models[0].with_structured_output(City, method="json_mode").with_retry(stop_after_attempt=1)
models[0].batch(["One.", "Two."])
OpenAI(model="fake", base_url=f"{URL}/v1", max_tokens=8).invoke("Once")
embeddings = OpenAIEmbeddings(model="fake", base_url=f"{URL}/v1", check_embedding_ctx_length=False)
embeddings.embed_documents(["one", "two"])
