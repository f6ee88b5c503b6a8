"""What can go wrong, one class per thing a caller would treat differently.

Raised where the facts are. Turned into HTTP in api/problems.py and into text and exit code in cli/failure.py,
nowhere else. Expected refusals (a plan that found no place) are values, not errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class GpulayerError(Exception):
    """Every error that people see.

    `code` is stable and made for programs; `message` says what happened, to what, with numbers; `hint` what to do now.
    """

    default_code: ClassVar[str] = "failed"

    def __init__(self, message: str, *, hint: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(GpulayerError):
    """The words were wrong: an option, a unit, a body, a configuration key. Nothing was changed."""

    default_code = "invalid_request"


class NotFound(GpulayerError):
    """No job, replica, node or token of that name."""

    default_code = "not_found"


class Refused(GpulayerError):
    """Understood and declined: a name in use, a job that ended, something that would break."""

    default_code = "refused"


class PermissionDenied(GpulayerError):
    """No token, a wrong one, or one whose role does not allow this."""

    default_code = "permission_denied"


class Unreachable(GpulayerError):
    """No node answers, or the node has no leader to ask."""

    default_code = "unreachable"


class WaitTimeout(GpulayerError, TimeoutError):
    """Waited as long as was asked for; what was waited for goes on."""

    default_code = "wait_timeout"


class StorageFailed(GpulayerError):
    """The disk refused: full, read-only, damaged, or of another version."""

    default_code = "storage_failed"


class JobEnded(GpulayerError):
    """The job ended while something else of it was waited for.

    `state` says how (succeeded, failed, cancelled, lost), `reason` why: `code`, `text`, `hint`; None where nothing went
    wrong, or where it is not known.
    """

    default_code = "job_ended"

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        code: str | None = None,
        state: str = "",
        reason: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.state = state
        self.reason = reason


BY_CODE: dict[str, type[GpulayerError]] = {
    kind.default_code: kind
    for kind in (
        GpulayerError,
        InvalidRequest,
        NotFound,
        Refused,
        PermissionDenied,
        Unreachable,
        WaitTimeout,
        StorageFailed,
        JobEnded,
    )
}
