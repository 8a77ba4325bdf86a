"""Runs clients of the Responses API against a server with the scripted model, and prints what each got as
JSON.

python responses_clients.py URL MODEL
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM fetches it otherwise

import agents
import litellm
import openai
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "How is the weather?"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": False,
}


class City(BaseModel):
    city: str


def weather(place: str) -> str:
    """How the weather is."""
    return f"sunny in {place}"


def clock(place: str) -> str:
    """What time it is."""
    return f"noon in {place}"


def openai_client(client: openai.OpenAI, model: str) -> dict[str, Any]:
    parsed = client.responses.parse(model=model, input=QUESTION, text_format=City)
    with client.responses.stream(model=model, input=QUESTION) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_response()
    first = client.responses.create(model=model, input=QUESTION, tools=[WEATHER], store=True)
    call = first.output[0]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_id = client.responses.create(
        model=model, input=[output], tools=[WEATHER], previous_response_id=first.id
    )
    conversation: Any = [{"role": "user", "content": QUESTION}, *first.output, output]
    by_input = client.responses.create(model=model, input=conversation, tools=[WEATHER])
    kept = client.responses.retrieve(first.id)
    client.responses.delete(first.id)
    chat = client.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}])
    return {
        "parsed": parsed.output_parsed.city if parsed.output_parsed is not None else None,
        "streamed": streamed.output_text,
        "last_event": events[-1],
        "call": [call.name, json.loads(call.arguments)],
        "by_id": by_id.output_text,
        "by_input": by_input.output_text,
        "is_kept": kept.output == first.output,
        "chat": chat.choices[0].message.content,
    }


async def openai_agents(client: openai.AsyncOpenAI, model: Any) -> dict[str, Any]:
    agents.set_default_openai_client(client, use_for_tracing=False)
    agents.set_tracing_disabled(True)
    expert = agents.Agent(name="Expert", model=model)
    asked = agents.Agent(
        name="Assistant",
        model=model,
        tools=[agents.function_tool(weather), agents.function_tool(clock)],
        handoffs=[expert],
    )
    whole = await agents.Runner.run(asked, QUESTION)
    streamed = agents.Runner.run_streamed(asked, QUESTION)
    items = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
    return {
        "whole": whole.final_output,
        "streamed": streamed.final_output,
        "last_agent": whole.last_agent.name,
        "items": items,
    }


def langchain(url: str, model: str, *, uses_responses: bool) -> dict[str, Any]:
    client = ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key=lambda: "EMPTY", use_responses_api=uses_responses
    )
    bound = client.bind_tools([langchain_tool(weather)])
    messages: list[Any] = [("user", QUESTION)]
    asked = bound.invoke(messages)
    calls = asked.tool_calls
    messages += [asked, *(ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in calls)]
    return {
        "call": [calls[0]["name"], calls[0]["args"]],
        "answer": bound.invoke(messages).text,
        "streamed": "".join(chunk.text for chunk in client.stream(QUESTION)),
    }


def litellm_client(url: str, model: str) -> dict[str, Any]:
    server: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "EMPTY"}
    response: Any = litellm.responses(input=QUESTION, **server)
    events: Any = litellm.responses(input=QUESTION, stream=True, **server)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    server["model"] = f"text-completion-openai/{model}"
    completion: Any = litellm.text_completion(prompt=QUESTION, max_tokens=16, **server)
    return {
        "whole": response.output_text,
        "streamed": "".join(deltas),
        "completion": completion.choices[0].text,
    }


async def pydantic_ai(client: openai.AsyncOpenAI, model: str) -> dict[str, Any]:
    responses = OpenAIResponsesModel(model, provider=OpenAIProvider(openai_client=client))
    agent = PydanticAgent(responses, tools=[weather, clock])
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        streamed = await stream.get_output()
    return {"whole": whole.output, "streamed": streamed}


async def main() -> None:
    url, model = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0)
    async_client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0)
    chats = agents.OpenAIChatCompletionsModel(model, async_client)
    report = {
        "openai": openai_client(client, model),
        "openai-agents": await openai_agents(async_client, model),
        "openai-agents by chats": await openai_agents(async_client, chats),
        "langchain": langchain(url, model, uses_responses=True),
        "langchain by chats": langchain(url, model, uses_responses=False),
        "litellm": litellm_client(url, model),
        "pydantic-ai": await pydantic_ai(async_client, model),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
