"""The page to chat on: `/`, and the files below `/page/` that it is made of."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).with_name("page")

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the files of two releases do not fit together
}

mimetypes.add_type("text/javascript", ".js")  # some Windows programs name another, and browsers do not run that


class Pages(StaticFiles):
    """The files of the page. Needs no key, and asks nothing of any other machine."""

    def __init__(self) -> None:
        super().__init__(directory=PAGE)

    async def index(self, request: Request) -> Response:
        """GET /."""
        return await self.get_response("index.html", request.scope)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """A file, or 304."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response
