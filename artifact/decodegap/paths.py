"""Where everything is: every place of the bundle, named once."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """The folders of one checkout, all derived from its root."""

    root: Path

    @property
    def results(self) -> Path:
        """Shipped records: the paper's data."""
        return self.root / "artifact" / "results"

    @property
    def local(self) -> Path:
        """This machine's own records: the measuring cache, ignored by git."""
        return self.results / "local"

    @property
    def published(self) -> Path:
        """The study's own numbers, with their sources."""
        return self.root / "artifact" / "published" / "published.json"

    @property
    def claims(self) -> Path:
        """What is claimed, and when a claim counts as reproduced."""
        return self.root / "artifact" / "claims.toml"

    @property
    def sizes(self) -> Path:
        """What the packages of each lock take on a disk, as `make sizes` measured it."""
        return self.root / "requirements" / "sizes.toml"

    @property
    def schema(self) -> Path:
        """JSON Schema of a record, exported from the model."""
        return self.root / "artifact" / "schema" / "record.schema.json"

    @property
    def notebooks(self) -> Path:
        """The papermill-parameterised notebooks."""
        return self.root / "notebooks"

    @property
    def figures(self) -> Path:
        """The style sheet and the generated figures."""
        return self.root / "figures"

    @property
    def generated(self) -> Path:
        """Generated tables and macros that the paper includes."""
        return self.paper / "generated"

    @property
    def kernels(self) -> Path:
        """Libraries that were compiled for this machine's card, ignored by git."""
        return self.root / ".cache" / "kernels"

    @property
    def paper(self) -> Path:
        """The paper's own text, and what is built from it."""
        return self.root / "paper"


def imported(store: Path) -> Path:
    """Where the local `store` keeps records that others measured: apart, so that they never count as measured here."""
    return store / "imported"


HERE = Places(Path(__file__).resolve().parents[2])
DATA = Path(__file__).resolve().parent / "data"
