"""What a client is told when something goes wrong: GpulayerError -> HTTP. The only place that does it.

An exception that is no GpulayerError is our own mistake: it is logged with its traceback, and the client is told no
more than that.
"""

from __future__ import annotations

import structlog
from starlette.responses import Response

from gpulayer.model.errors import GpulayerError, InvalidRequest, NotFound, PermissionDenied
from gpulayer.wire.http import dump, error_to_json, status_of

log = structlog.get_logger()

JSON = "application/json"
# When trying again may help: a node that starts takes seconds; a full disk is emptied by a person.
RETRY_AFTER_SECONDS = {503: 1, 507: 10}


class NotAuthenticated(PermissionDenied):
    """401 and not 403: another token may help, another role would not."""


class MethodNotAllowed(InvalidRequest):
    default_code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: list[str]) -> None:
        super().__init__(f"{method} is not possible on {path}", hint="use " + " or ".join(allowed))
        self.allowed = allowed


def answer_for(error: GpulayerError) -> Response:
    status = 401 if isinstance(error, NotAuthenticated) else status_of(error)
    response = Response(dump(error_to_json(error)), status_code=status, media_type=JSON)
    if isinstance(error, NotAuthenticated):
        response.headers["WWW-Authenticate"] = 'Bearer realm="gpulayer"'
    if isinstance(error, MethodNotAllowed):
        response.headers["Allow"] = ", ".join(error.allowed)
    if status in RETRY_AFTER_SECONDS:
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS[status])
    return response


def answer_for_bug(error: Exception, method: str, path: str) -> Response:
    """Logs the traceback. What it says is for the operator's log, not for whoever asked."""
    log.error("api.request_failed", method=method, path=path, exc_info=error)
    message = f"the node failed while it answered {method} {path}"
    return answer_for(
        GpulayerError(message, hint="the daemon's log has the traceback; please report it", code="internal")
    )


def no_such_path(path: str) -> NotFound:
    return NotFound(f"there is nothing at {path[:200]}", hint="GET /v1/openapi.json lists the paths")
