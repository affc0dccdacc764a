"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.serve import requests
from pyfly_cpp.serve.answers import Answer, fingerprint
from pyfly_cpp.serve.body import read_json
from pyfly_cpp.serve.chat import Chat
from pyfly_cpp.serve.completions import Completion
from pyfly_cpp.serve.embeddings import Embeddings
from pyfly_cpp.serve.errors import ApiError, internal, stopping
from pyfly_cpp.serve.openapi import describe
from pyfly_cpp.serve.orders import read_decoding, written
from pyfly_cpp.serve.pages import Pages
from pyfly_cpp.serve.responses import Response as ResponseAnswer
from pyfly_cpp.serve.security import OWNER, App, guarded, refuse
from pyfly_cpp.serve.service import Service
from pyfly_cpp.serve.streams import ClientLeft, Sender, closing, while_there


def make_app(service: Service) -> App:
    """The application, behind everything that is asked of strangers."""
    routes, pages = _Routes(service), Pages()

    def post(path: str, kind: Callable[..., Answer], model: type[requests.Request]) -> Route:
        return Route(path, _Answers(service, path, kind, model), methods=["POST"])

    def error(request: Request, failure: Exception) -> Response:
        assert isinstance(failure, HTTPException)
        path = request.scope["path"][:100]
        words = {404: f"there is no {path}", 405: f"{path} takes another method"}
        told = ApiError(failure.status_code, f"{words.get(failure.status_code, failure.detail)}.")
        return JSONResponse(told.body(), failure.status_code, failure.headers)

    app = Starlette(
        routes=[
            post("/v1/chat/completions", Chat, requests.ChatRequest),
            post("/v1/completions", Completion, requests.CompletionRequest),
            post("/v1/responses", ResponseAnswer, requests.ResponseRequest),
            Route("/v1/embeddings", _Embeddings(service, "/v1/embeddings"), methods=["POST"]),
            Route("/tokenize", _Checked(service, "/tokenize", routes.tokenize), methods=["POST"]),
            Route("/detokenize", _Checked(service, "/detokenize", routes.detokenize), methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
            Route("/", pages.index),
            Mount("/page", pages),
        ],
        exception_handlers={HTTPException: error},
    )
    return guarded(app, service.settings)


class _Checked:
    """A route that takes JSON, as an ASGI application: errors in the protocol's shape, counted, and logged."""

    def __init__(self, service: Service, path: str, work: Callable[[Request], Any] | None = None) -> None:
        self.service = service
        self._path = path
        self._work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun, status, has_begun = time.monotonic(), 200, False

        async def send_on(message: Any) -> None:
            nonlocal has_begun, status
            if message["type"] == "http.response.start":
                has_begun, status = True, message["status"]
            await send(message)

        more: dict[str, Any] = {}
        try:
            await self.serve(Request(scope, receive), scope, receive, send_on, more)
        except ClientLeft:
            status = 499  # what nginx calls it
        except Exception as failure:
            if not isinstance(failure, ApiError):
                self.service.log.failure(failure)
            error = failure if isinstance(failure, ApiError) else internal()
            status = error.status
            if not has_begun and status != 499:
                await refuse(error, scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and does not wait any more
            status = 503
            raise
        finally:
            self.service.metrics.requests.labels(self._path, status).inc()
            client = scope.get("client") or ("", 0)
            self.service.log.request(
                client=client[0], path=self._path, status=status, seconds=round(time.monotonic() - begun, 3), **more
            )

    async def serve(self, request: Request, scope: Any, receive: Any, send: Any, more: dict[str, Any]) -> None:
        """Answers; what is to be logged goes into `more`."""
        assert self._work is not None
        await (await self._work(request))(scope, receive, send)


class _Answers(_Checked):
    """A route whose answers are written by the model."""

    def __init__(self, service: Service, path: str, kind: Callable[..., Answer], model: type[requests.Request]) -> None:
        super().__init__(service, path)
        self._kind = kind
        self._model = model

    async def serve(self, request: Request, scope: Any, receive: Any, send: Any, more: dict[str, Any]) -> None:
        """Answers with the tokens of a request."""
        service = self.service
        body = await read_json(request, service.settings.limits, self._model)
        decoding = read_decoding(body, request.headers.get("x-pyfly"), service.model.decoding)
        if service.turns.is_closed:
            raise stopping()
        if service.log.wants_texts:
            more["request"] = body
        answer = await asyncio.to_thread(self._understand, body, decoding)
        answer.orders = [replace(order, owner=scope.get(OWNER, 0)) for order in answer.orders]
        texts = [""] * len(answer.orders)
        try:
            if answer.stream:
                await while_there(receive, self._stream(answer, send, texts))
            else:
                whole = await while_there(receive, self._whole(answer, texts))
                await JSONResponse(whole)(scope, receive, send)
        finally:
            if service.log.wants_texts:
                more["texts"] = texts

    def _understand(self, body: Mapping[str, Any], decoding: Decoding) -> Answer:
        return self._kind(self.service.model, self.service.settings, body, decoding)

    async def _whole(self, answer: Answer, texts: list[str]) -> dict[str, Any]:
        async with closing(self.service.pieces(answer)) as pieces:
            async for i, piece in pieces:
                texts[i] += piece.text
                for _ in answer.add(i, piece):
                    pass
        return answer.whole()

    async def _stream(self, answer: Answer, send: Any, texts: list[str]) -> None:
        sender = Sender(send, self.service.settings.limits.read_seconds, answer.is_named)
        async with closing(self.service.pieces(answer)) as pieces:
            i, piece = await pieces.__anext__()  # an error before it has its own status
            await sender.begin()
            for event in answer.begin():
                await sender.event(event)
            try:
                while True:
                    texts[i] += piece.text
                    for event in answer.add(i, piece):
                        await sender.event(event)
                    i, piece = await pieces.__anext__()
            except StopAsyncIteration:
                for event in answer.end():
                    await sender.event(event)
            except ApiError as failure:
                await sender.event(answer.fail(failure))
            await sender.end()


class _Embeddings(_Checked):
    """The route whose answers are vectors."""

    async def serve(self, request: Request, scope: Any, receive: Any, send: Any, more: dict[str, Any]) -> None:
        """Answers with vectors."""
        service = self.service
        body = await read_json(request, service.settings.limits, requests.EmbeddingRequest)
        if service.embedder is None:
            raise ApiError(501, "this server has no embeddings; start it with --embeddings.", code="not_supported")
        if service.log.wants_texts:
            more["request"] = body
        wanted = await asyncio.to_thread(Embeddings, service.model, service.embedder, service.settings, body)
        content = await while_there(receive, self._whole(wanted))
        await Response(content, media_type="application/json")(scope, receive, send)

    async def _whole(self, wanted: Embeddings) -> bytes:
        async with closing(self.service.vectors(wanted.texts)) as vectors:
            async for vector in vectors:
                wanted.add(vector)
        return wanted.whole()


class _Routes:
    """The routes that are answered at once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name != self._service.settings.name:
            error = ApiError(404, f"there is no model {name[:100]!r} here.", param="model", code="model_not_found")
            return JSONResponse(error.body(), 404)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        model = self._service.model
        rule, embedder = written(model.decoding), self._service.embedder
        return {
            "id": self._service.settings.name, "object": "model", "created": self._created, "owned_by": "pyfly-cpp",
            "pyfly": {
                "rule": rule, "lossless": model.decoding.is_exact, "system_fingerprint": fingerprint(rule),
                "drafters": model.drafters, "n_ctx": model.batch.n_ctx, "n_parallel": model.batch.n_parallel,
                "n_vocab": model.n_vocab, "max_tokens": self._service.settings.limits.max_tokens,
                "embeddings": None if embedder is None else {
                    "n_embd": embedder.n_embd, "n_ctx": embedder.n_ctx, "pooling": embedder.pooling,
                },
            },
        }  # fmt: skip

    async def health(self, _: Request) -> Response:
        """GET /health."""
        turns, model = self._service.turns, self._service.model
        status = "stopping" if turns.is_closed else "failed" if model.has_failed else "ok"
        body = {"status": status, "texts_running": turns.running, "texts_waiting": turns.waiting}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def metrics(self, _: Request) -> Response:
        """GET /metrics."""
        content = await asyncio.to_thread(self._service.metrics.render)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(describe(bool(self._service.settings.keys)))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await read_json(request, self._service.settings.limits, requests.TokenizeRequest)
        model, add_bos = self._service.model, body.get("add_special_tokens") is not False
        tokens = await asyncio.to_thread(model.tokenize, body["prompt"], True, add_bos)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": model.batch.n_ctx})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await read_json(request, self._service.settings.limits, requests.DetokenizeRequest)
        model = self._service.model

        def text() -> str:
            return model.text(model.known(body["tokens"], "tokens"), True)

        return JSONResponse({"prompt": await asyncio.to_thread(text)})

    async def tokenizer_info(self, _: Request) -> Response:
        """GET /tokenizer_info."""
        return JSONResponse(self._service.model.tokenizer_info())
