"""The description of the routes, as OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from pyfly_cpp._version import __version__
from pyfly_cpp.serve import requests

_JSON = "application/json"


def describe(has_keys: bool) -> dict[str, Any]:
    """The description; `has_keys`: whether an API key is asked for."""
    posts: dict[str, tuple[str, type[requests.RequestBody]]] = {
        "/v1/chat/completions": ("An answer to messages.", requests.ChatRequest),
        "/v1/completions": ("Continuations of texts.", requests.CompletionRequest),
        "/v1/responses": ("An answer as a list of items.", requests.ResponseRequest),
        "/v1/messages": ("A message, as a list of blocks.", requests.MessageRequest),
        "/v1/messages/count_tokens": ("The tokens of a prompt.", requests.CountRequest),
        "/v1/embeddings": (
            "Embeddings; 501 if the server was started without them.",
            requests.EmbeddingRequest,
        ),
        "/completion": ("A continuation, as llama.cpp's server tells it.", requests.NativeRequest),
        "/infill": ("The text between two texts.", requests.InfillRequest),
        "/apply-template": ("The prompt of a chat.", requests.ChatRequest),
        "/v1/chat/completions/input_tokens": ("The tokens of a chat's prompt.", requests.ChatRequest),
        "/tokenize": ("The tokens of a text.", requests.TokenizeRequest),
        "/detokenize": ("The text of tokens.", requests.DetokenizeRequest),
    }
    gets = {
        "/v1/models": "The model.",
        "/props": "Defaults of requests, and the chat template.",
        "/slots": "Which slots are in use.",
        "/health": "Whether the server serves.",
        "/metrics": "Counters, as Prometheus reads them.",
        "/tokenizer_info": "The tokenizer, for lm-eval.",
    }
    schemas, shared = models_json_schema(
        [(model, "validation") for _, model in posts.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {_JSON: {"schema": schemas[model, "validation"]}}},
                "responses": {"200": {"description": text}, "default": {"description": "An error."}},
            }
        }
        for path, (text, model) in posts.items()
    }
    for path, text in gets.items():
        paths[path] = {"get": {"summary": text, "responses": {"200": {"description": text}}}}
    out: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pyfly-cpp serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": shared["$defs"]},
    }
    if has_keys:
        out["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        out["security"] = [{"key": []}]
    return out
