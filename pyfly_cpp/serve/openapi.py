"""The description of the routes, as OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from pyfly_cpp import __version__
from pyfly_cpp.serve import fields

_JSON = "application/json"


def describe(has_keys: bool) -> dict[str, Any]:
    """The description; `has_keys`: whether an API key is asked for."""
    posts = {
        "/v1/chat/completions": ("An answer to messages.", fields.CHAT),
        "/v1/completions": ("Continuations of texts.", fields.COMPLETION),
        "/v1/responses": ("An answer as a list of items.", fields.RESPONSE),
        "/v1/embeddings": ("Vectors of texts; 501 where the server was started without them.", fields.EMBEDDING),
        "/tokenize": ("The tokens of a text.", fields.TOKENIZE),
        "/detokenize": ("The text of tokens.", fields.DETOKENIZE),
    }
    gets = {
        "/v1/models": "The model.",
        "/health": "Whether the server serves.",
        "/metrics": "Counters, as Prometheus reads them.",
        "/tokenizer_info": "What lm-eval asks of a tokenizer.",
    }
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {_JSON: {"schema": schema}}},
                "responses": {"200": {"description": "It."}, "default": {"description": "An error."}},
            }
        }
        for path, (text, schema) in posts.items()
    }
    for path, text in gets.items():
        paths[path] = {"get": {"summary": text, "responses": {"200": {"description": "It."}}}}
    out: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "pyfly-cpp serve", "version": __version__},
        "paths": paths,
    }
    if has_keys:
        out["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        out["security"] = [{"key": []}]
    return out
