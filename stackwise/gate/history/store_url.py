"""Store URL: where a history is, said without its password."""

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
    """A history cannot be read or written; says which, and why, without a password."""


@dataclass(frozen=True)
class StoreUrl:
    """Where a history is.

    Attributes:
        path: of the SQLite file; None for a server.
        shown: the same for people: no password, and no parameters, which may hold one.
    """

    path: Path | None
    shown: str
    _url: URL = field(repr=False)

    @classmethod
    def of(cls, text: str | Path) -> Self:
        """What a path or URL names.

        Raises:
            ValueError: no URL, or one of another database. The text is not repeated: a password may be in it.
        """
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        # What is meant as a URL and is none is not taken for a path, which would be shown with its password.
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
            # A password with an @ that is not written %40: what follows it is taken for the host, and shown.
            raise ValueError(f"store: got a URL with more than one @; allowed: {_ALLOWED}, @ in it as %40")
        shown = url.set(drivername="postgresql", password=None, query={}).render_as_string()
        return cls(None, shown, url.set(drivername="postgresql+psycopg"))

    @property
    def url(self) -> URL:
        """For SQLAlchemy, with its password."""
        return self._url

    def clean(self, text: str) -> str:
        """`text` without whatever of the URL is secret, however it is written there."""
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
    """Parameters that are secret by their names, as `?password=` and `?sslpassword=` are."""
    found = []
    for name, value in url.query.items():
        if any(part in name.lower() for part in ("pass", "secret", "token", "key")):
            found += [value] if isinstance(value, str) else list(value)
    return found
