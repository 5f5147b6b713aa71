"""Instructor: pydantic models from answers."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

MESSAGES = [{"role": "user", "content": "What is the weather?"}]


class Report(BaseModel):
    """A report of the weather."""

    model_config = ConfigDict(extra="forbid")  # a model this small would add fields without end

    sky: Literal["clear", "grey"]
    rain: bool
    hours: list[Literal[6, 12, 18]] = Field(min_length=2, max_length=2)


client = OpenAI(base_url=f"{os.environ['KVKEEP']}/v1", api_key="none", max_retries=0)
ASK = {
    "model": os.path.basename(os.environ["MODEL"]),
    "messages": MESSAGES,
    "response_model": Report,
    "max_tokens": 1500,
    "temperature": 0,
    "max_retries": 1,
}

for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    found = instructor.from_openai(client, mode=mode).create(**ASK)
    assert isinstance(found, Report)
    assert len(found.hours) == 2
    print(f"ok: a pydantic model by {mode}")

partial = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).create_partial(**ASK)
*_, last = partial
assert last.sky in ("clear", "grey")
assert len(last.hours) == 2
print("ok: create_partial, streamed")
