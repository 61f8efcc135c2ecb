"""Every exception Tilescout raises on purpose, by what the caller can do about it.

    TilescoutError
    ├── UsageError          (ValueError)    the call is wrong: fix the argument
    │   └── UnknownNameError (KeyError)     no such name: the message lists what exists
    ├── UnsupportedError    (ValueError)    no template can serve this problem on this device
    ├── NoWinnerError       (LookupError)   strict look-up found nothing: tune it first
    ├── StoreError          (RuntimeError)  the database cannot be used: names the repair
    └── DeviceError         (RuntimeError)  no suitable GPU, or no worker for it

A config that fails is not an exception but a trial with a status and a reason.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "DeviceError",
    "NoWinnerError",
    "StoreError",
    "TilescoutError",
    "UnknownNameError",
    "UnsupportedError",
    "UsageError",
]


class TilescoutError(Exception):
    """Base of all errors that a user can cause or mend; its text is the whole message."""


class UsageError(TilescoutError, ValueError):
    """An argument, file or field is wrong; the message has the value and what is allowed."""


class UnknownNameError(UsageError, KeyError):
    """A name that nothing answers to; the message lists the names that exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str], advice: str = "") -> None:
        listing = ", ".join(sorted(known)) or "none"
        tail = f"; {advice}" if advice else ""
        super().__init__(f"unknown {kind} {name!r}: known are {listing}{tail}")

    # KeyError would show the repr of the message.
    __str__ = Exception.__str__


class UnsupportedError(TilescoutError, ValueError):
    """No template serves the problem on the device; the message has each template's reason."""


class NoWinnerError(TilescoutError, LookupError):
    """A strict look-up found no verified winner; the message says what to tune."""


class StoreError(TilescoutError, RuntimeError):
    """The database is corrupt, locked, read-only or of another schema; names the repair."""


class DeviceError(TilescoutError, RuntimeError):
    """No GPU of the kind that the call needs."""
