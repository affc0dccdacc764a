"""The routes."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from pyfly_cpp._version import __version__
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.serve import requests
from pyfly_cpp.serve.answer_requests import ANY_SEED, read_decoding, read_sampling, settings_of, written
from pyfly_cpp.serve.answers import Answer, Event, system_fingerprint
from pyfly_cpp.serve.api_errors import ApiError, bad_request, internal, not_supported, stopping
from pyfly_cpp.serve.chat import chat_completion
from pyfly_cpp.serve.embeddings import Embeddings
from pyfly_cpp.serve.messages import Message, as_chat
from pyfly_cpp.serve.native import Infill, Native
from pyfly_cpp.serve.openapi import describe
from pyfly_cpp.serve.pages import Pages
from pyfly_cpp.serve.prompt_reading import ChatInput, ChatPrompt, input_of
from pyfly_cpp.serve.responses import Response as ResponseAnswer
from pyfly_cpp.serve.security import OWNER, App, client_of, guarded, refuse
from pyfly_cpp.serve.service import Service
from pyfly_cpp.serve.streams import ClientLeft, Entries, Sender, Whole, closing, header_of, portions, while_there
from pyfly_cpp.serve.text_completions import TextAnswer
from pyfly_cpp.serve.timings import Progress

_BYTES_OF_ROW = 1024
"""About, of the JSON of a token's log-probabilities."""


def make_app(service: Service) -> App:
    """The application, behind everything that is asked of strangers."""
    routes, pages = _Routes(service), Pages()

    def post(path: str, kind: Callable[..., Answer], model: type[requests.RequestBody]) -> Route:
        return Route(path, _Answers(service, path, kind, model), methods=["POST"])

    def error(request: Request, failure: Exception) -> Response:
        assert isinstance(failure, HTTPException)
        path = request.scope["path"][:100]
        if path.startswith("/api/"):  # an error as Ollama's clients read it
            remedy = f"add it as an OpenAI server, {request.base_url}v1"
            why = f"this server speaks OpenAI's protocol, not Ollama's; {remedy}."
            return JSONResponse({"error": why}, failure.status_code)
        words = {404: f"there is no {path}", 405: f"{path} takes another method"}
        told = ApiError(failure.status_code, f"{words.get(failure.status_code, failure.detail)}.")
        return JSONResponse(told.body(), failure.status_code, failure.headers)

    app = Starlette(
        routes=[
            *(post(f"{root}/chat/completions", chat_completion, requests.ChatRequest) for root in ("/v1", "")),
            post("/v1/completions", TextAnswer, requests.CompletionRequest),
            *(post(path, Native, requests.NativeRequest) for path in ("/completion", "/completions")),
            post("/infill", Infill, requests.InfillRequest),
            *(post(f"{root}/responses", ResponseAnswer, requests.ResponseRequest) for root in ("/v1", "")),
            post("/v1/messages", Message, requests.MessageRequest),
            *(Route(path, _Embeddings(service, path), methods=["POST"]) for path in ("/v1/embeddings", "/embeddings")),
            *(
                Route(path, _Checked(service, path, work), methods=["POST"])
                for path, work in (
                    ("/tokenize", routes.tokenize),
                    ("/detokenize", routes.detokenize),
                    ("/apply-template", routes.apply_template),
                    ("/v1/chat/completions/input_tokens", routes.input_tokens),
                    ("/chat/completions/input_tokens", routes.input_tokens),
                    ("/v1/messages/count_tokens", routes.count_tokens),
                )
            ),
            Route("/tokenizer_info", routes.tokenizer_info),
            Route("/props", routes.props),
            Route("/slots", routes.slots),
            *(Route(f"{root}/models", routes.models) for root in ("/v1", "")),
            Route("/v1/models/{name:path}", routes.model),
            *(Route(f"{root}/health", routes.health) for root in ("", "/v1")),
            Route("/metrics", routes.metrics),
            Route("/openapi.json", routes.openapi),
            Route("/", pages.index),
            Mount("/page", pages),
        ],
        exception_handlers={HTTPException: error},
    )
    return _Refusals(guarded(app, service.settings), service)


class _Refusals:
    """Counts and logs requests that no route has answered: by the name, the key, the path or the method."""

    def __init__(self, app: App, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] in (401, 403, 404, 405):
                status, client = message["status"], scope.get("client") or ("", 0)
                self._service.metrics.requests.labels("other", status).inc()
                self._service.log.request(client=client[0], path=scope["path"][:100], status=status)
            await send(message)

        await self._app(scope, receive, send_on)


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

    def __init__(
        self, service: Service, path: str, kind: Callable[..., Answer], model: type[requests.RequestBody]
    ) -> None:
        super().__init__(service, path)
        self._kind = kind
        self._model = model

    async def serve(self, request: Request, scope: Any, receive: Any, send: Any, more: dict[str, Any]) -> None:
        """Answers with the tokens of a request."""
        service = self.service
        given = await service.body(request, self._model)
        body, fields = given.body, self._model.model_fields
        decoding = read_decoding(body, request.headers.get("x-pyfly"), service.model.decoding)
        if service.turns.is_closed:
            raise stopping()
        if service.log.wants_texts:
            more["request"] = given.body.raw
        answer = await service.understand(request, given, self._kind, service.model, service.settings, body, decoding)
        answer.requests = [replace(one, owner=scope.get(OWNER, 0)) for one in answer.requests]
        unknown = [name for name, value in body.raw.items() if value is not None and name not in fields]
        if unknown:
            answer.headers["X-Pyfly-Ignored"] = header_of(unknown)
        texts = [""] * len(answer.requests)
        work = self._stream if answer.stream else self._whole
        try:
            await while_there(receive, work(answer, client_of(scope), send, texts))
        finally:
            if service.log.wants_texts:
                more["texts"] = texts

    async def _whole(self, answer: Answer, whose: str, send: Any, texts: list[str]) -> None:
        n_tokens = sum(len(one.prompt) + one.max_tokens for one in answer.requests)
        async with closing(self.service.pieces(answer, whose)) as pieces:
            async for i, piece in pieces:
                if piece is not None:
                    texts[i] += piece.text
                    for _ in await self._events(answer, i, piece):
                        pass
        parts = await self.service.reading.run(n_tokens, lambda: portions(answer.whole()))
        await Whole(parts, answer.headers)({}, None, send)

    async def _stream(self, answer: Answer, whose: str, send: Any, texts: list[str]) -> None:
        sender = Sender(send, answer.is_named, answer.is_marked)
        try:
            async with closing(self.service.pieces(answer, whose)) as pieces:
                async for i, piece in pieces:
                    # What fails immediately has its own status; what waits or reads a long prompt shows a head.
                    if not sender.has_begun and (answer.tells_progress or not isinstance(piece, Progress)):
                        await sender.begin(answer.headers)
                        for event in answer.begin():
                            await sender.event(event)
                    if piece is None:
                        await sender.keep_alive(self.service.settings.limits.silent_seconds / 2)
                        continue
                    texts[i] += piece.text
                    for event in await self._events(answer, i, piece):
                        await sender.event(event)
            for event in answer.end():
                await sender.event(event)
        except Exception as failure:
            if not sender.has_begun or isinstance(failure, ClientLeft):
                raise
            await sender.event(answer.fail(failure if isinstance(failure, ApiError) else internal()))
            await sender.end()
            raise  # it is counted
        await sender.end()

    async def _events(self, answer: Answer, i: int, piece: Piece | Progress) -> Iterable[Event]:
        """The events of a piece; those of a prompt with log-probabilities are made in a thread."""
        n_rows = 0 if isinstance(piece, Progress) or piece.prompt is None else len(piece.prompt)
        if not n_rows:
            return answer.add(i, piece)
        return await self.service.reading.run(n_rows * _BYTES_OF_ROW, lambda: list(answer.add(i, piece)))


class _Embeddings(_Checked):
    """The route whose answers are vectors."""

    async def serve(self, request: Request, scope: Any, receive: Any, send: Any, more: dict[str, Any]) -> None:
        """Answers with vectors."""
        service = self.service
        given = await service.body(request, requests.EmbeddingRequest)
        if service.embedder is None:
            raise not_supported("this server has no embeddings; start it with --embeddings.")
        if service.log.wants_texts:
            more["request"] = given.body.raw
        is_native = self._path == "/embeddings"
        how = (service.model, service.embedder, service.settings, given.body, is_native)
        wanted = await service.understand(request, given, Embeddings, *how)
        whole = await while_there(receive, self._whole(wanted))
        await Whole(portions(whole))(scope, receive, send)

    async def _whole(self, wanted: Embeddings) -> Any:
        async with closing(self.service.vectors(wanted.texts)) as vectors:
            async for vector in vectors:
                add = functools.partial(wanted.add, vector)
                await self.service.reading.run(vector.nbytes, add)
        return wanted.whole()


class _Routes:
    """The routes that are answered immediately."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name not in self._service.settings.names:
            error = ApiError(404, f"there is no model {name[:100]!r} here.", param="model", code="model_not_found")
            return JSONResponse(error.body(), 404)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        model, settings = self._service.model, self._service.settings
        gate, embedder = written(model.decoding), self._service.embedder
        most = min(settings.default_max_tokens or model.batch.n_ctx, settings.limits.max_tokens, model.batch.n_ctx)
        return {
            "id": self._service.settings.name, "object": "model", "created": self._created, "owned_by": "pyfly-cpp",
            "aliases": list(self._service.settings.names), "tags": list(self._service.settings.tags),
            "pyfly": {
                "gate": gate, "lossless": model.decoding.is_exact, "system_fingerprint": system_fingerprint(gate),
                "drafters": model.drafters, "n_ctx": model.batch.n_ctx, "n_parallel": model.batch.n_parallel,
                "n_vocab": model.n_vocab, "max_tokens": settings.limits.max_tokens,
                "defaults": {**self._sampling(), "max_tokens": most, "seed": settings.seed},
                "page": settings.page_sampling,
                "embeddings": None if embedder is None else {
                    "n_embd": embedder.n_embd, "n_ctx": embedder.n_ctx, "pooling": embedder.pooling,
                },
            },
        }  # fmt: skip

    def _sampling(self) -> dict[str, Any]:
        """The sampling of requests that do not set it, by their fields."""
        return settings_of(read_sampling(requests.SharedFields.model_validate({}), self._service.settings.sampling))

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

    async def tokenize(self, request: Request) -> App:
        """POST /tokenize."""
        given = await self._service.body(request, requests.TokenizeRequest)
        body, model = given.body, self._service.model
        if body.content is not None:  # as llama.cpp's clients ask
            text, special, add_bos = body.content, body.parse_special is not False, body.add_special is True
        elif body.prompt is not None:
            text, special, add_bos = body.prompt, True, body.add_special_tokens is not False
        else:
            raise bad_request("prompt is missing.", "prompt")

        def parts() -> list[bytes | bytearray]:
            tokens = model.tokenize(text, special, add_bos)
            told: Iterable[Any] = tokens
            if body.with_pieces:
                told = ({"id": token, "piece": _shown(model.vocabulary.piece(token, True))} for token in tokens)
            return portions({"tokens": Entries(told), "count": len(tokens), "max_model_len": model.batch.n_ctx})

        return Whole(await self._service.understand(request, given, parts))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        prompt = await self._prompt(request, requests.CountRequest, as_chat)
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        given = await self._service.body(request, requests.DetokenizeRequest)
        model = self._service.model

        def text() -> str:
            if len(given.body.tokens) > model.batch.n_ctx:
                raise bad_request(f"tokens has more than {model.batch.n_ctx}, the context; send fewer.", "tokens")
            return model.text(model.known(given.body.tokens, "tokens"), True)

        found = await self._service.understand(request, given, text)
        return JSONResponse({"prompt": found, "content": found})

    async def apply_template(self, request: Request) -> Response:
        """POST /apply-template."""
        return JSONResponse({"prompt": (await self._prompt(request)).text})

    async def input_tokens(self, request: Request) -> Response:
        """POST /v1/chat/completions/input_tokens."""
        return JSONResponse({"input_tokens": len((await self._prompt(request)).tokens)})

    async def _prompt(
        self, request: Request, fields: type[requests.RequestBody] = requests.ChatRequest,
        read: Callable[[Any], ChatInput] = input_of,
    ) -> ChatPrompt:  # fmt: skip
        """The prompt of a chat; `read`: what makes a chat of a body with these fields."""
        service = self._service
        given = await service.body(request, fields)

        def prompt() -> ChatPrompt:
            return ChatPrompt(service.model, service.settings, read(given.body))

        return await service.understand(request, given, prompt)

    async def props(self, _: Request) -> Response:
        """GET /props."""
        service, model = self._service, self._service.model
        most = service.settings.default_max_tokens or -1
        seed = ANY_SEED if service.settings.seed is None else service.settings.seed
        info = model.tokenizer_info()
        return JSONResponse({
            "default_generation_settings": {
                "n_ctx": model.batch.n_ctx,
                "params": {**self._sampling(), "seed": seed, "n_predict": most, "max_tokens": most},
            },
            "total_slots": model.batch.n_parallel, "model_alias": service.settings.name,
            "model_path": Path(model.path).name, "modalities": {"vision": False, "audio": False},
            "chat_template": info["chat_template"] or "", "bos_token": info["bos_token"] or "",
            "eos_token": info["eos_token"] or "", "build_info": f"pyfly-cpp {__version__}", "is_sleeping": False,
        })  # fmt: skip

    async def slots(self, _: Request) -> Response:
        """GET /slots."""
        service, model = self._service, self._service.model
        used = service.slots()
        return JSONResponse([
            {"id": i, "n_ctx": model.batch.n_ctx, "speculative": bool(model.drafters), "is_processing": i in used}
            for i in range(model.batch.n_parallel)
        ])  # fmt: skip

    async def tokenizer_info(self, _: Request) -> Response:
        """GET /tokenizer_info."""
        return JSONResponse(self._service.model.tokenizer_info())


def _shown(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are no text alone."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
