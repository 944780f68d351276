"""What the packages of each lock take on this disk, as requirements/sizes.toml: requirements/sizes.py.

Run by the interpreter that has them. The guides and the paper quote these sizes; a test holds them to the file.
"""

import platform
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from licences import ROOT, SETS
from packaging.requirements import Requirement

FILE = ROOT / "requirements" / "sizes.toml"
HEAD = """# Written by `make sizes` from installed packages: the disk blocks of every file that a package lists, in MB
# of 10^6 bytes. A set that was not installed whole, at the locked versions, keeps what was measured before.
"""
BLOCK = 512  # bytes of an st_blocks, whatever the file system's own blocks are


def main() -> int:
    """Measure the sets that are here and write the file."""
    before = tomllib.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    lines = [HEAD]
    for name in SETS:
        found = measured(name) or before.get(name)
        if found is None:
            sys.stderr.write(f"decode-gap: {name} is not installed whole in {sys.executable}: its size stays unknown\n")
            continue
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in found.items()), ""]
    FILE.write_text("\n".join(lines), encoding="utf-8")
    print(FILE.relative_to(ROOT))
    return 0


def measured(name: str) -> dict[str, object] | None:
    """Packages, megabytes and where they were measured; None where a package of the lock is absent or another."""
    wanted = [Requirement(line) for line in lock(name) if line and not line.startswith("#")]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate()]
    blocks, kind = 0, {}
    for each in wanted:
        try:
            found = metadata.distribution(each.name)
        except metadata.PackageNotFoundError:
            return None
        if not each.specifier.contains(found.version, prereleases=True):
            return None
        files = (Path(str(found.locate_file(file))) for file in found.files or ())
        blocks += sum(path.stat().st_blocks for path in files if path.is_file())
        kind |= {"torch": found.version} if each.name == "torch" else {}
    return {"packages": len(wanted), "mb": round(blocks * BLOCK / 1e6), "python": platform.python_version(), **kind}


def lock(name: str) -> list[str]:
    """The lines of a lock."""
    return (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines()


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    sys.exit(main())
