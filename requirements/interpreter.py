"""Can this Python run the bundle? Silent if so; otherwise one line that says what is missing and what to do.

    python requirements/interpreter.py --venv              # in range, and able to make a virtual environment?
    python requirements/interpreter.py analysis [measure]  # in range, and holding the packages of these sets?

Old interpreters read this file too, so it keeps to syntax that every Python 3 knows.
"""

import signal
import sys

OLDEST, NEWEST = (3, 11), (3, 13)  # requires-python in pyproject.toml; the test suite compares them
# For `make lab`, for installing this project, and for one quantised path, which says itself that it is missing.
NOT_NEEDED = {"jupyterlab", "setuptools", "bitsandbytes"}


def out_of_range():
    """Why this version cannot be used, or an empty string."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return ""
    return "%s is Python %s, not 3.11, 3.12 or 3.13" % (sys.executable, sys.version.split()[0])


def cannot_make_venv():
    """Which part of making a virtual environment is missing, or an empty string."""
    try:
        import ensurepip
        import venv
    except ImportError as error:
        return "%s has no %s" % (sys.executable, error.name)
    return "" if ensurepip.version() and venv.__name__ else "%s has an empty ensurepip" % sys.executable


def missing_packages(sets):
    """Which direct dependencies of these sets are not installed; another version than ours is accepted."""
    import re
    import tomllib
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    groups = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["dependency-groups"]
    missing = []
    for name in sets:
        for pin in groups[name]:
            package = re.match(r"[\w.-]+", pin).group()
            try:
                version(package)
            except PackageNotFoundError:
                if package not in NOT_NEEDED:
                    missing.append(pin)
    return missing


def complaint(arguments):
    """The one line to show, or an empty string."""
    if out_of_range() or arguments == ["--venv"]:
        return out_of_range() or cannot_make_venv()
    missing = missing_packages(arguments)
    if not missing:
        return ""
    return "%s is used as it is, and lacks %s: install them there, or let make use its own .venv" % (
        sys.executable,
        ", ".join(missing),
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback; make says the rest
    line = complaint(sys.argv[1:])
    if line:
        sys.stderr.write("decode-gap: %s\n" % line)
    sys.exit(2 if line else 0)
