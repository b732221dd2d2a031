"""Store URL: location of a history, shown without its password."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from sqlalchemy import URL

__all__ = ["HistoryError", "StoreUrl"]

_ALLOWED = "the path of an SQLite file, sqlite:///PATH, or postgresql://USER:PASSWORD@HOST:PORT/DATABASE"


class HistoryError(ValueError):
    """A history cannot be read or written. The message names it and the reason, without a password."""


@dataclass(frozen=True)
class StoreUrl:
    """Location of a history.

    Attributes:
        path: path of the SQLite file; None for a server.
        shown: location for messages, without a password and without parameters, which may contain one.
    """

    path: Path | None
    shown: str
    _url: URL = field(repr=False)

    @classmethod
    def of(cls, text: str | Path) -> Self:
        """Parse a path or URL.

        Raises:
            ValueError: an invalid URL, or the URL of another database. The message omits the text, which may
                contain a password.
        """
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        # An invalid URL is not treated as a path, which would be shown with its password.
        scheme = "" if isinstance(text, Path) or ":" not in text else text.partition(":")[0].lower()
        if isinstance(text, Path) or ("://" not in text and not scheme.startswith(("postgres", "sqlite"))):
            return cls._of_file(Path(text))
        try:
            url = make_url(text)
        except (ArgumentError, ValueError):
            raise ValueError(
                f"store: got what is no URL; allowed: {_ALLOWED}; @ : / # in a password as %XX"
            ) from None
        dialect, _, driver = url.drivername.partition("+")
        if dialect == "sqlite" and not driver:
            return cls._of_file(Path(url.database or ""))
        if dialect not in ("postgresql", "postgres") or driver not in ("", "psycopg"):
            raise ValueError(f"store: got a URL of {url.drivername!r}; allowed: {_ALLOWED}")
        if not url.database:
            raise ValueError(f"store: got a URL without a database; allowed: {_ALLOWED}")
        if "@" in (url.host or ""):
            # An @ in a password is not written %40. The text after it would be parsed as the host, and shown.
            raise ValueError(f"store: got a URL with more than one @; allowed: {_ALLOWED}, @ in it as %40")
        shown = url.set(drivername="postgresql", password=None, query={}).render_as_string()
        return cls(None, shown, url.set(drivername="postgresql+psycopg"))

    @property
    def url(self) -> URL:
        """URL for SQLAlchemy, with its password."""
        return self._url

    def clean(self, text: str) -> str:
        """Return `text` without the secrets of the URL, also if they are percent-encoded."""
        secrets = [self._url.password or "", *(_values(self._url) if self.path is None else [])]
        written = {form(each) for each in secrets if each for form in (str, quote, quote_plus)}
        for each in sorted(written, key=len, reverse=True):
            text = text.replace(each, "***")
        return text

    @classmethod
    def _of_file(cls, path: Path) -> Self:
        if str(path) in ("", ".", ":memory:") or path.is_dir():
            raise ValueError(f"store: got {str(path)!r}; allowed: {_ALLOWED}")
        from sqlalchemy import URL

        return cls(path, str(path), URL.create("sqlite", database=str(path)))


def _values(url: URL) -> list[str]:
    """Return the values of parameters with names of secrets, such as `?password=` and `?sslpassword=`."""
    found = []
    for name, value in url.query.items():
        if any(part in name.lower() for part in ("pass", "secret", "token", "key")):
            found += [value] if isinstance(value, str) else list(value)
    return found
