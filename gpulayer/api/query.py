"""Query parameters, judged as strictly as bodies: each known, each once, each of its type."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from gpulayer.model.errors import InvalidRequest
from gpulayer.model.units import parse_count
from gpulayer.wire.http import nearest, shown

LIMIT_DEFAULT = 100
LIMIT_MAX = 1000
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


class Query:
    """The parameters of one request; one that the path does not know is refused with the nearest that it does."""

    def __init__(self, request: Request, known: Sequence[str]) -> None:
        self._values: dict[str, str] = {}
        for key, value in request.query_params.multi_items():
            if key not in known:
                raise InvalidRequest(f"unknown parameter {shown(key)}", hint=nearest(key, known))
            if key in self._values:
                raise InvalidRequest(f"the parameter {key} is given twice", hint="leave out one of them")
            self._values[key] = value

    def text(self, key: str) -> str | None:
        return self._values.get(key)

    def flag(self, key: str) -> bool:
        value = self._values.get(key, "0").lower()
        if value not in _YES + _NO:
            raise InvalidRequest(f"{key}: {shown(value)} is not yes or no", hint=f"write {key}=1, or leave it out")
        return value in _YES

    def count(self, key: str, *, least: int = 0, most: int) -> int | None:
        value = self._values.get(key)
        # Python's int() takes more than digits ("1_0", " 7 ", other scripts' digits).
        if value is not None and not (value.isascii() and value.isdigit() and len(value) < 20):
            raise InvalidRequest(
                f"{key}: {shown(value)} is not a whole number", hint=f"write a number from {least} to {most}"
            )
        return None if value is None else parse_count(value, key, least=least, most=most)

    def number(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1e12:
            raise InvalidRequest(f"{key}: {shown(value)} is not a time", hint="write UTC seconds, as in 1767225600.5")
        return number

    def one_of(self, key: str, allowed: Sequence[str], default: str) -> str:
        value = self._values.get(key, default)
        if value not in allowed:
            raise InvalidRequest(f"{key}: {shown(value)} is unknown", hint="use one of " + ", ".join(allowed))
        return value

    def limit(self) -> int:
        return self.count("limit", least=1, most=LIMIT_MAX) or LIMIT_DEFAULT
