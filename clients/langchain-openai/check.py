"""LangChain's ``ChatOpenAI`` and ``OpenAI``."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

SETTINGS = {
    "base_url": f"{os.environ['KVKEEP']}/v1",
    "api_key": "none",
    "model": os.path.basename(os.environ["MODEL"]),
    "temperature": 0,
    "max_tokens": 16,
}
MESSAGES = [SystemMessage("Be brief. " * 30), HumanMessage("Say it.")]


class Answer(BaseModel):
    """An answer to the question."""

    model_config = ConfigDict(extra="forbid")  # a model this small would add fields without end
    colour: Literal["red", "green"]
    sure: bool


@tool
def switch(on: bool) -> str:
    """Switch the light on or off."""
    return f"on: {on}"


chat = ChatOpenAI(**SETTINGS, stream_usage=True)
whole = chat.invoke(MESSAGES)
assert whole.usage_metadata["output_tokens"] == 16
assert whole.response_metadata["finish_reason"] == "length"
assert chat.invoke(MESSAGES).usage_metadata["input_token_details"]["cache_read"] > 0
print("ok: ChatOpenAI.invoke, with cached tokens in its usage")

parts = list(chat.stream(MESSAGES))
joined = parts[0]
for part in parts[1:]:
    joined += part
assert joined.content == whole.content
assert joined.usage_metadata["output_tokens"] == 16
print("ok: stream: the text and usage of invoke")

chain = ChatPromptTemplate.from_messages([("user", "Tell me about {what}.")]) | chat
assert len(chain.batch([{"what": "rain"}, {"what": "snow"}, {"what": "hail"}])) == 3
print("ok: a chain's batch")

known = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
assert len(known.response_metadata["logprobs"]["content"]) == 16
print("ok: logprobs")

said = OpenAI(**SETTINGS).invoke("one two three")
assert said == "".join(OpenAI(**SETTINGS).stream("one two three"))
print("ok: OpenAI, the completions")

longer = ChatOpenAI(**(SETTINGS | {"max_tokens": 1000}))
structured = longer.with_structured_output(Answer, method="json_schema")
assert isinstance(structured.invoke(MESSAGES), Answer)
print("ok: with_structured_output by json_schema")

by_call = longer.with_structured_output(Answer, method="function_calling")
assert isinstance(by_call.invoke(MESSAGES), Answer)
able = longer.bind_tools([switch], tool_choice="any", strict=True, parallel_tool_calls=False)
(call,) = able.invoke(MESSAGES).tool_calls
assert call["name"] == "switch"
assert switch.invoke(call["args"]) in ("on: True", "on: False")
print("ok: with_structured_output by function_calling; bind_tools with tool_choice any")
