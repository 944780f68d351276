"""Whether a notebook was given what it asks for: papermill injects anything, so its parameters are checked here."""

from collections.abc import Mapping, Sequence
from typing import Any

from decodegap.errors import BadInputError

PLAIN_TYPES = (str, int, float, bool, list, dict, tuple, type(None))


def notebook_parameters(names: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The parameters of a notebook whose global names are `names`; raise `BadInputError` for one that is unknown.

    papermill injects whatever it is given, so a misspelt parameter would be ignored in silence. Every plain value in
    the namespace that IPython did not put there is a parameter; modules and functions are not.
    """
    mine = {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and name not in ("In", "Out") and isinstance(value, PLAIN_TYPES)
    }
    if unknown := sorted(set(mine) - set(known)):
        raise BadInputError(f"parameter {unknown[0]!r} is unknown to this notebook; known are {', '.join(known)}")
    return {name: mine[name] for name in known if name in mine}
