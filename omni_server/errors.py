"""All errors that callers can see, with their HTTP statuses and OpenAI error codes.

The API converts an `OmniError` to OpenAI's error format in one place; the offline API raises it unchanged.
`ConfigError` is for the operator, before the server accepts requests.
"""


class OmniError(Exception):
    """A request failed. `status`, `type` and `code` are those of the HTTP response."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(OmniError):
    """An error of the client. `param` names the field, as in `messages[0].content[1].input_audio.data`."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ModelNotFoundError(InvalidRequestError):
    status = 404
    code = "model_not_found"


class VoiceNotFoundError(InvalidRequestError):
    status = 404
    code = "voice_not_found"


class RequestTooLargeError(InvalidRequestError):
    status = 413
    code = "request_too_large"


class UrlTooLongError(InvalidRequestError):
    status = 414
    code = "url_too_long"


class HeadersTooLargeError(InvalidRequestError):
    status = 431
    code = "headers_too_large"


class UploadTimeoutError(InvalidRequestError):
    """The request did not arrive in time."""

    status = 408
    code = "upload_timeout"


class AuthenticationError(OmniError):
    """The request has no API key, or one that the server does not know."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class OriginNotAllowedError(InvalidRequestError):
    """A browser sent the request from a web site that the operator does not allow."""

    status = 403
    type = "permission_error"
    code = "origin_not_allowed"


class HostNotAllowedError(InvalidRequestError):
    """The request reaches a keyless loopback server under a host name that an attacker may control."""

    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class RateLimitError(OmniError):
    """The caller is at its limit; other callers are served."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class OverloadedError(OmniError):
    """The server is full, starting or shutting down; the same request may succeed later."""

    status = 503
    type = "service_unavailable_error"
    code = "server_overloaded"


class DeadlineExceededError(OmniError):
    """The request missed its deadline and was released in every stage."""

    status = 504
    code = "request_timeout"


class StageError(OmniError):
    """One request failed in a stage; the stage continues to serve other requests."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"stage '{stage}': {message}")
        self.stage = stage


class CorruptDataError(StageError):
    """The input or output of a stage is corrupt, so the request fails instead of producing noise. Other
    requests in the same batch are not affected. `kind` is an
    `omni_server.protocol.corruption.CorruptionKind`."""

    code = "corrupt_data"

    def __init__(self, stage: str, kind: str, detail: str) -> None:
        super().__init__(stage, f"corrupt data ({kind}): {detail}")
        self.kind = kind


class EndlessSpeechError(StageError):
    """The speech reached its limit of tokens, and the caller wants no incomplete one. The same request may
    succeed if its sampling has no seed."""

    code = "endless_speech"

    def __init__(self, stage: str) -> None:
        super().__init__(stage, "the speech has not ended within its limit of tokens")


class StageDeadError(StageError):
    """The engine process of a stage died or hung while this request needed it."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_dead"


class StageDownError(StageError):
    """A stage that the request needs is being restarted. The code is the name of the stage and `_down`."""

    status = 503
    type = "service_unavailable_error"

    def __init__(self, stage: str) -> None:
        super().__init__(stage, "it is being restarted; try again later")
        self.code = f"{stage}_down"


class ConfigError(Exception):
    """An error in a stage config, a model folder or a flag; the message says what to change."""


class ReplacementError(Exception):
    """An engine was not replaced; the message says why, and what it does now."""


def first_leaf(group: BaseExceptionGroup[OmniError]) -> OmniError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OmniError)
    return error
