"""kvkeep.server.openapi: the document is complete, and true of answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from kvkeep.engine.messages import Usage
from kvkeep.server.openapi import ANSWERS, EXAMPLES, TAGS, Failure, Report

pytestmark = pytest.mark.anyio


@pytest.fixture
async def document(http: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get("/openapi.json")).json()
    return found


async def test_every_endpoint_is_described(document: dict[str, Any]) -> None:
    paths = document["paths"]
    assert ANSWERS.keys() == paths.keys() - {"/metrics"}
    for path, methods in paths.items():
        for operation in methods.values():
            assert set(operation["tags"]) <= TAGS.keys()
            assert operation["description"]
            assert "422" not in operation["responses"]
            assert ("requestBody" in operation) == (path in EXAMPLES)
            for status, response in operation["responses"].items():
                for content in response["content"].values():
                    assert content["schema"], (path, status)


async def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    def check(value: Any) -> None:
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                check(inner)
        if isinstance(value, dict) and "$ref" in value:
            name = value["$ref"].removeprefix("#/components/schemas/")
            assert name in document["components"]["schemas"]

    check(document)


async def test_examples_are_answered_as_described(http: httpx.AsyncClient) -> None:
    for path, bodies in EXAMPLES.items():
        for body in bodies:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            if not body.get("stream"):
                TypeAdapter(ANSWERS[path]).validate_json(answer.content)
    for path, kind in ANSWERS.items():
        if path not in EXAMPLES and "{" not in path:
            answer = await http.request("POST" if path == "/flush_cache" else "GET", path)
            TypeAdapter(kind).validate_json(answer.content)
    answer = await http.post("/v1/completions", json={"prompt": 1})
    TypeAdapter(Failure).validate_json(answer.content)


def test_reports_are_described_in_full() -> None:
    counts = {"prompt_tokens", "completion_tokens"}
    assert Report.model_fields.keys() == set(Usage.__struct_fields__) - counts


async def test_token_ids_are_bounded(document: dict[str, Any]) -> None:
    tokens = document["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]
    assert tokens["items"] == {"type": "integer", "minimum": 0, "maximum": 127}
