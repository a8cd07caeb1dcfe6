"""Every error a client can meet: an HTTP status and one sentence, in the shape its API knows.

Bad input is 400 and never 500; overload is 429 and a missing engine 503, both with Retry-After.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dayzero.chat.text_limit import TextTooLong
from dayzero.errors import EngineDead, FieldError, Overloaded, UserError

Style = Literal["openai", "anthropic"]

# Status -> the type each API gives it.
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "server_error",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# What ended a request in the engine -> status and code. A grammar that cannot be followed came with the request.
ENGINE_ERRORS = {
    "nan_logits": 500,
    "grammar": 400,
    "grammar_too_complex": 400,
    "engine_died": 503,
    "too_long": 400,
    "overloaded": 429,
    "internal": 500,
}
CODES = {"too_long": "context_length_exceeded", "overloaded": "rate_limit_exceeded"}


class ApiError(UserError):
    """An answer with an error status. param: the field at fault, as ``messages[0].content``."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self, style: Style) -> dict[str, Any]:
        """The error object as the API of ``style`` has it."""
        if style == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = OPENAI_TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error. param and code may be null but are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """Anthropic's error."""

    type: Literal["error"]
    error: MessagesErrorDetail


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is at fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """503: no engine that could answer now."""
    return ApiError(503, message, code=code)


def as_api_error(error: UserError) -> ApiError:
    """What a client is told of an error from the rooms below."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), code=CODES["overloaded"])
    if isinstance(error, EngineDead):
        return unavailable(str(error), "engine_died")
    code = CODES["too_long"] if isinstance(error, TextTooLong) else None
    return bad(str(error), error.field if isinstance(error, FieldError) else None, code)


def engine_error(error: tuple[str, str] | None, *, begun: bool) -> ApiError:
    """What a client is told of an Output that finished with ``error``. begun: some of the answer had come; what fails
    then was taken as good, so it is not the client's fault, unless nobody could have known before."""
    kind, sentence = error or ("internal", "the engine ended this request without a reason.")
    status = ENGINE_ERRORS.get(kind, 500)
    taken = begun and status == 400 and kind != "grammar_too_complex"
    return ApiError(500 if taken else status, sentence, code=CODES.get(kind, kind))


def internal() -> ApiError:
    """500: a fault of ours. The text of the exception stays in the log."""
    return ApiError(500, "the server met an internal error; its log has the details.", code="internal")


def error_headers(status: int, retry_after_s: int) -> dict[str, str]:
    """What an answer with this status says besides: when to come back, how to log in, that the connection ends."""
    if status in (429, 503):
        return {"retry-after": str(retry_after_s)}
    if status == 401:  # RFC 9110, 15.5.2
        return {"www-authenticate": "Bearer"}
    return {"connection": "close"} if status == 408 else {}
