"""Who may come in: names under which the server is asked, origins of web pages, API keys."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from pyfly_cpp.serve.api_errors import ApiError
from pyfly_cpp.serve.settings import Settings

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

_HOST = re.compile(r"(?:\[([^][]*)\]|([^][:]*))(?::[0-9]*)?")

OWNER = "pyfly.owner"
"""In a request's scope: the number of its key, from 0."""

OPEN_PATHS = ("/", "/health", "/v1/health")
"""Paths that need no key, like all below `/page/`."""


def guarded(app: App, settings: Settings) -> App:
    """The application behind everything that is asked of strangers."""
    app = _Keys(app, settings.keys) if settings.keys else app
    if settings.origins:
        app = CORSMiddleware(
            app, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["Retry-After", "X-Pyfly-Not-Enforced", "X-Pyfly-Ignored"],
        )  # fmt: skip
    return _Names(app, settings)


class _Names:
    """Lets in who asks for this server by its name, and web pages of this server or of named origins alone.

    A web page elsewhere can make its reader's browser ask any address; by a name of its own that it lets point here
    (DNS rebinding), it could also read the answers.
    Starlette's TrustedHostMiddleware cannot allow all addresses, and that of 0.38 takes `127.0.0.1:attacker.example`.
    """

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._origins = settings.origins
        self._any_name = "*" in settings.hosts
        self._names = {"localhost", settings.host.lower(), *(name.lower() for name in settings.hosts)}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        name = _name_of(hosts[0]) if len(hosts) == 1 else ""
        if not (self._any_name or (name and name in self._names) or _is_address(name)):
            await refuse(ApiError(
                403, f"this server does not know itself as {name[:100]!r}; ask it by its address, or start it with "
                "--allow-host NAME.", code="unknown_host",
            ), scope, receive, send)  # fmt: skip
            return
        origin = headers.get("origin")
        if origin is not None and not self._is_welcome(origin, hosts[0] if hosts else ""):
            await refuse(ApiError(
                403, f"web pages of {origin[:100]!r} may not ask this server; start it with --cors ORIGIN.",
                code="unknown_origin",
            ), scope, receive, send)  # fmt: skip
            return
        await self._app(scope, receive, send)

    def _is_welcome(self, origin: str, host: str) -> bool:
        return "*" in self._origins or origin in self._origins or origin in (f"http://{host}", f"https://{host}")


def client_of(scope: Scope) -> str:
    """Who asks, as far as turns among clients go: a key, or without keys an address."""
    return f"key {scope[OWNER]}" if OWNER in scope else str((scope.get("client") or ("",))[0])


def _name_of(host: str) -> str:
    """The name in a Host header, without its port; empty if it is written in no way that names are."""
    found = _HOST.fullmatch(host.strip().lower())
    return "" if found is None else found[1] or found[2]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can ask at an address or name."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
        return bool(found) and all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found)
    except (OSError, ValueError, UnicodeError):
        return False


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/page/")


class _Keys:
    """Lets in who has one of the keys."""

    def __init__(self, app: App, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            headers = Headers(scope=scope)
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
            owner = self._find(given.encode("latin-1"))  # the bytes as they came
            if owner is None:
                what = "is wrong" if given else "is missing; send it as `Authorization: Bearer KEY`"
                challenge = {"WWW-Authenticate": "Bearer"}
                error = ApiError(401, f"the API key {what}.", code="invalid_api_key", headers=challenge)
                await refuse(error, scope, receive, send)
                return
            scope[OWNER] = owner
        await self._app(scope, receive, send)

    def _find(self, given: bytes) -> int | None:
        """The number of a key; None if it is none."""
        digest = hashlib.sha256(given).digest()
        # All of them are compared, each in constant time.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return found.index(True) if any(found) else None


async def refuse(error: ApiError, scope: Scope, receive: Any, send: Any) -> None:
    """Answers with an error."""
    await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
