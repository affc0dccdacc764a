"""Errors of a request, in the protocol's own shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that the client is told: a status, and one sentence that names the thing and the remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            status: Of HTTP.
            message: For people.
            param: The field of the request that it is about.
            code: For programs.
            headers: Of the response.
            more: Fields of the error besides, or instead of, those of all.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self._more = dict(more or {})

    def body(self) -> dict[str, Any]:
        """As JSON, in the shape of OpenAI's protocol and of Anthropic's."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self._more}
        return {"type": "error", "error": error}


def bad_request(
    message: str, param: str | None = None, code: str | None = None, more: Mapping[str, Any] | None = None
) -> ApiError:
    """A request that cannot be understood or served as it is."""
    return ApiError(400, message, param=param, code=code, more=more)


def not_supported(message: str) -> ApiError:
    """Something that this server lacks. The header keeps OpenAI's client from asking twice more, as it does after any
    other 5xx."""
    return ApiError(501, message, code="not_supported", headers={"X-Should-Retry": "false"})


def internal() -> ApiError:
    """Something that is no fault of the request. What it was may quote a prompt, so the client is not told."""
    return ApiError(500, "the server failed on this request; its log has more.", code="internal_error")


def stopping() -> ApiError:
    """The server ends."""
    return ApiError(503, "the server is shutting down; try again later.", code="stopping", headers={"Retry-After": "5"})
