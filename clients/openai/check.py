"""OpenAI's own library."""

import asyncio
import json
import os
from typing import Literal

import openai
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

SETTINGS = {"base_url": f"{os.environ['KVKEEP']}/v1", "api_key": "none", "max_retries": 0}
client = OpenAI(**SETTINGS)
MODEL = client.models.list().data[0].id
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say it. " * 40}]
GREEDY = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Rome"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    sunny: bool
    wind: Literal[0, 1, 2, 3]


def chat() -> str:
    """Returns what the model says to ``GREEDY``."""
    answer = client.chat.completions.create(**GREEDY)
    choice = answer.choices[0]
    assert answer.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    again = client.chat.completions.create(**GREEDY).usage
    assert 0 < again.prompt_tokens_details.cached_tokens < again.prompt_tokens
    print("ok: chat; the same prompt again reports cached tokens")
    return choice.message.content


def streaming(text: str) -> None:
    events = list(
        client.chat.completions.create(
            **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == text
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].usage.completion_tokens == 24
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "length"
    print("ok: streaming: the text and usage of the whole answer")


async def at_once(text: str) -> None:
    async with openai.AsyncOpenAI(**SETTINGS) as many:
        answers = await asyncio.gather(*(many.chat.completions.create(**GREEDY) for _ in range(16)))
    assert {answer.choices[0].message.content for answer in answers} == {text}
    print("ok: 16 requests at once with AsyncOpenAI")


def logprobs(text: str) -> None:
    found = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    content = found.choices[0].logprobs.content
    assert len(content) == 24
    assert b"".join(bytes(one.bytes) for one in content).decode(errors="replace") == text
    for one in content:
        assert one.logprob <= 0
        assert len(one.top_logprobs) == 3
        assert (one.top_logprobs[0].token, one.top_logprobs[0].logprob) == (one.token, one.logprob)
    echoed = client.completions.create(
        model=MODEL, prompt="one two three", max_tokens=1, echo=True, logprobs=1, temperature=0
    ).choices[0]
    assert echoed.text.startswith("one two three")
    assert echoed.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in echoed.logprobs.token_logprobs[1:])
    print("ok: logprobs with top_logprobs; echo with those of the prompt")


def schema() -> None:
    asked = GREEDY | {"max_tokens": 1000, "response_format": Weather}
    parsed = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(parsed, Weather)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    print("ok: json_schema, parsed into a pydantic model, whole and streamed")


def tools() -> None:
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 1000, "tools": [TOOL]}
    asked["parallel_tool_calls"] = False
    choices = ("required", {"type": "function", "function": {"name": "get_weather"}})
    for choice in choices:
        answer = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        (call,) = answer.message.tool_calls
        assert call.id
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    assert answer.finish_reason in ("tool_calls", "stop")
    with client.chat.completions.stream(**asked, tool_choice="required", temperature=0) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    whole = client.chat.completions.create(**asked, tool_choice="required", temperature=0)
    (call,) = whole.choices[0].message.tool_calls
    assert [one.function.arguments for one in streamed] == [call.function.arguments]
    turns = [
        *ASK,
        whole.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    after = client.chat.completions.create(**(asked | {"messages": turns, "max_tokens": 5}))
    assert after.usage.completion_tokens <= 5
    print("ok: tools: a required and a named call, whole and streamed, and the turn after it")


def choices() -> None:
    found = client.completions.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=4, seed=1, temperature=1.0
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    print("ok: completions of two prompts with n=2")


def refused(**fields: object) -> openai.APIStatusError:
    try:
        client.chat.completions.create(**(GREEDY | fields))
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"{fields} was answered")


def errors() -> None:
    absent, cold = refused(model="absent"), refused(temperature=-1)
    assert isinstance(absent, openai.NotFoundError)
    assert isinstance(cold, openai.BadRequestError)
    assert (absent.code, cold.param) == ("model_not_found", "temperature")
    print("ok: errors are NotFoundError and BadRequestError, with code and param")


text = chat()
streaming(text)
asyncio.run(at_once(text))
logprobs(text)
schema()
choices()
errors()
tools()
