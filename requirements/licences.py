"""The licences of everything that the locks install, as docs/licences.md: requirements/licences.py [--check].

Run by the interpreter that has the packages; each says its own licence in its metadata.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
SETS = {
    "analysis": "rebuilds the paper from records",
    "measure": "measures",
    "dev": "tests and checks the code",
    "quant": "sources of kernels, optional",
    "interpreter": "runs kernels without a GPU in tests, optional",
}
HEAD = """# Licences

decode-gap itself is under the Apache License 2.0 (LICENSE). It ships none of the packages below: `make` installs them,
each under its own licence, as its metadata states it. Made by `make licences` from what the locks pin.
"""
FOOT = """## What is compiled from a package's sources

With the optional quant set, `make kernels` compiles two libraries on the user's own machine, from a changed copy of
sources that gptqmodel 7.6.0 holds in `gptqmodel_ext`. Neither sources nor libraries are part of decode-gap. What is
changed, and why, is in `artifact/decodegap/quant_patches.py`.

- `marlin`: Marlin, by IST-DASLab, as Neural Magic and vLLM's authors carried it on; Apache License 2.0.
- `exllamav2`: ExLlamaV2's product over GPTQ's layout, by turboderp; MIT, and Apache License 2.0 as part of gptqmodel.

No other folder is read. In particular `swordfish`, which the same package holds under the GNU Affero General Public
License, is neither compiled nor linked. bitsandbytes' kernels are loaded as its package ships them, torch's as torch
ships them.
"""
LONGEST = 60
CLASSIFIER = "License :: "
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)")


def main() -> int:
    """Write the page, or with --check say whether it is what it should be."""
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("docs/licences.md is up to date" if same else "docs/licences.md is out of date: make licences")
        return 0 if same else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


def page() -> str:
    """The page for the locks and the packages of this interpreter."""
    lines = [HEAD]
    for name, purpose in SETS.items():
        lines += [f"## {name}: {purpose}", "", "| Package | Version | Licence |", "| --- | --- | --- |"]
        lines += [f"| {package} | {version} | {licence(package)} |" for package, version in pins(name)]
        lines.append("")
    return "\n".join([*lines, FOOT])


def pins(name: str) -> list[tuple[str, str]]:
    """Package and version of every line of a lock; a package with several pins (by platform) is named once."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines():
        if match := PIN.match(line):
            found.setdefault(match[1], match[2])
    return sorted(found.items(), key=lambda item: item[0].lower())


def licence(package: str) -> str:
    """What the package's own metadata say of its licence, in a few words."""
    try:
        about = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return "not needed by the Python that this page was made with"
    if expression := about.get("License-Expression"):
        return str(expression)
    named = [each for each in about.get_all("Classifier") or [] if each.startswith(CLASSIFIER)]
    if named:
        return "; ".join(sorted({each.rsplit(" :: ", 1)[-1] for each in named}))
    text = " ".join((about.get("License") or "").split())
    return (text[:LONGEST] + ("…" if len(text) > LONGEST else "")).replace("|", "/") or "not stated in its metadata"


if __name__ == "__main__":
    sys.exit(main())
