"""How the bundle becomes a tarball for a DOI archive: the same files give the same bytes, and no git is needed."""

import gzip
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

from decodegap import bundle, records
from decodegap.errors import BadInputError
from decodegap.paths import HERE, Places

LIST = "FILES.sha256"
LEFT_OUT = (".ci/", ".gitattributes", ".gitignore")  # of use in a checkout only


def build(version: str, epoch_s: int, folder: Path, at: Places = HERE) -> tuple[Path, Path]:
    """Write `decode-gap-<version>.tar.gz` and its checksum file into `folder`; return both.

    Raises `BadInputError` where there is neither a git checkout nor the file list that an archive carries.
    """
    name = f"decode-gap-{version}"
    contents = {path: (at.root / path).read_bytes() for path in files(at)}
    listed = "".join(f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in contents.items())
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, data in sorted({**contents, LIST: listed.encode()}.items()):
            runnable = data.startswith(b"#!")
            bundle.add(tar, f"{name}/{path}", data, epoch_s, 0o755 if runnable else 0o644)
    target = folder / f"{name}.tar.gz"
    records.write_atomically(target, gzip.compress(out.getvalue(), 9, mtime=0))
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    sums = folder / f"{target.name}.sha256"
    records.write_atomically(sums, f"{digest}  {target.name}\n".encode())
    return target, sums


def files(at: Places = HERE) -> list[str]:
    """Every file of the bundle, sorted: what git tracks, or, in an unpacked archive, what its list names."""
    if (at.root / ".git").exists():
        done = subprocess.run(["git", "ls-files", "-z"], cwd=at.root, capture_output=True, text=True, check=True)
        names = [name for name in done.stdout.split("\0") if name]
    elif (at.root / LIST).is_file():
        names = [line.partition("  ")[2] for line in (at.root / LIST).read_text(encoding="utf-8").splitlines()]
    else:
        raise BadInputError(f"{at.root}: neither a git checkout nor an unpacked archive with its {LIST}")
    kept = [name for name in names if not name.startswith(LEFT_OUT) and (at.root / name).is_file()]
    return sorted(set(kept))
