"""LiteLLM's library, with its providers for OpenAI-compatible servers and for vLLM."""

import asyncio
import os

import litellm
from litellm.types.utils import ModelResponse

BASE = f"{os.environ['KVKEEP']}/v1"
MODEL = os.path.basename(os.environ["MODEL"])
MESSAGES = [{"role": "user", "content": "Say it. " * 40}]
ASK = {
    "model": f"openai/{MODEL}",
    "api_base": BASE,
    "api_key": "none",
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 16,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


def text(answer: ModelResponse) -> str:
    return answer.choices[0].message.content


first = litellm.completion(**ASK)
again = litellm.completion(**ASK)
assert text(again) == text(first)
assert again.usage.completion_tokens == 16
assert again.usage.prompt_tokens_details.cached_tokens > 0
print("ok: completion, with cached tokens in its usage")

events = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
rebuilt = litellm.stream_chunk_builder(events, messages=MESSAGES)
assert text(rebuilt) == text(first)
assert rebuilt.usage.completion_tokens == 16
print("ok: streaming, put together by stream_chunk_builder")

hosted = litellm.completion(**(ASK | {"model": f"hosted_vllm/{MODEL}"}))
assert text(hosted) == text(first)
print("ok: the provider hosted_vllm")

several = asyncio.run(
    litellm.atext_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=BASE,
        api_key="none",
        prompt="one two three",
        max_tokens=4,
        n=2,
        seed=1,
    )
)
assert [choice.index for choice in several.choices] == [0, 1]
print("ok: atext_completion with n=2")

router = litellm.Router([{"model_name": "any", "litellm_params": ASK}])
assert text(router.completion(model="any", messages=MESSAGES)) == text(first)
print("ok: Router")

try:
    litellm.completion(**(ASK | {"messages": [{"role": "user", "content": "long " * 20_000}]}))
except litellm.ContextWindowExceededError:
    print("ok: a prompt that is too long is a ContextWindowExceededError")

choice = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
called = litellm.completion(**(ASK | choice | {"max_tokens": 1000}))
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "switch"
assert '"on"' in call.function.arguments
print("ok: a required tool call")
