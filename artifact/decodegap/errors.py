"""What can go wrong for a user: one exception class per failure, each a single clear line."""

LONGEST = 1000  # characters of a message; a value that is longer than a line was not meant as one


class DecodeGapError(Exception):
    """Base of every failure that is reported as one line instead of a traceback.

    The message names the wrong value, where it was found, and the way out.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines()).encode("utf-8", "backslashreplace").decode()
        super().__init__(line if len(line) <= LONGEST else f"{line[:LONGEST]}…")


class BadInputError(DecodeGapError):
    """A parameter, slug or data file does not say something that can be done."""


class WrongGpuError(DecodeGapError):
    """The card that was asked for is not the card that is here."""


class BadRecordError(DecodeGapError):
    """A record is truncated, edited, of a foreign protocol, or not in its manifest."""


class StoreError(DecodeGapError):
    """A results folder cannot be read or written, or another run holds it."""


class MissingPackageError(DecodeGapError):
    """A package that this step needs is not installed in this interpreter."""


class UnsupportedError(DecodeGapError):
    """This machine cannot run the arm or path that was asked for."""


class WrongResultError(DecodeGapError):
    """Something computed here is not what it must be, so nothing measured here can be believed."""


class NotMeasuredError(DecodeGapError):
    """Measurements that were required are not there (`REQUIRE=measured`, or sessions that kept dying)."""

    exit_code = 1


class NotFitError(DecodeGapError):
    """This machine is not fit to measure on."""

    exit_code = 1
