"""How figures look, and how one becomes a file whose bytes depend on its records alone."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from decodegap.errors import BadInputError
from decodegap.paths import HERE

Format = Literal["pdf", "png", "svg"]

FORMATS: tuple[Format, ...] = ("pdf", "png", "svg")
COLUMN_IN, TEXT_IN = 3.34, 7.00
CREATOR = "decode-gap"

# Okabe and Ito's colours, safe for colour-blind readers, darkest first so that greyscale keeps an order; each
# system also has a marker and a dash of its own. Source: jfly.uni-koeln.de/color.
LOOKS: tuple[tuple[str, str, Any], ...] = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", (0, (5, 1.5))),
    ("#009E73", "^", (0, (1.5, 1.2))),
    ("#CC79A7", "D", (0, (5, 1.5, 1, 1.5))),
    ("#E69F00", "v", (0, (7, 1.5, 1, 1.5, 1, 1.5))),
    ("#56B4E9", "P", (0, (3, 1, 3, 3))),
    ("#000000", "X", (0, (1, 3))),
)


def look(index: int) -> tuple[str, str, Any]:
    """Colour, marker and dash of the system with this index."""
    shape = LOOKS[(index + index // len(LOOKS)) % len(LOOKS)]  # past the last colour, the same ones with other shapes
    return LOOKS[index % len(LOOKS)][0], shape[1], shape[2]


@contextmanager
def paper() -> Iterator[None]:
    """Matplotlib's defaults plus the paper's style sheet, whatever a user's own matplotlibrc says; restored after.

    Raises `BadInputError` where the style sheet is not there.
    """
    try:
        style = mpl.rc_params_from_file(str(HERE.figures / "paper.mplstyle"), use_default_template=False)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInputError(f"figures/paper.mplstyle: cannot be read: {why}; restore it with git") from None
    defaults = {k: v for k, v in mpl.rcParamsDefault.items() if not k.startswith(("backend", "interactive"))}
    with mpl.rc_context({**defaults, **style}):
        yield


def canvas(width_in: float, height_in: float) -> Figure:
    """An empty figure of this print size with an Agg canvas; no pyplot, so no global state. Call within `paper`."""
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    return figure


def settle(figure: Figure) -> Figure:
    """`figure` with its layout computed and kept, so that every format and every later drawing is the same picture.

    Constrained layout starts from where it last was: two files saved one after the other would differ a little.
    """
    figure.draw_without_rendering()
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def to_bytes(figure: Figure, fmt: Format, *, title: str, records: str, epoch_s: int) -> bytes:
    """`figure` as a file; its metadata holds the title, the hash of its records and their newest time, nothing else.

    The time is given to the backend itself rather than through SOURCE_DATE_EPOCH, so no environment is touched.
    """
    when = datetime.fromtimestamp(epoch_s, tz=UTC)
    source = f"records sha256:{records}"
    metadata: dict[Format, dict[str, Any]] = {
        "pdf": {
            "Title": title,
            "Subject": source,
            "Creator": CREATOR,
            "Producer": CREATOR,
            "CreationDate": when,
        },
        "svg": {"Title": title, "Source": source, "Creator": CREATOR, "Date": when.isoformat()},
        "png": {"Title": title, "Source": source, "Software": CREATOR, "Creation Time": when.isoformat()},
    }
    out = io.BytesIO()
    with paper():
        figure.savefig(out, format=fmt, metadata=metadata[fmt])
    return out.getvalue()
