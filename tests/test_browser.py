"""Whether the reports open from disk in a real browser: no console error, every picture there."""

import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from decodegap import execute, webpage
from decodegap.paths import HERE, Places

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--virtual-time-budget=5000", "--dump-dom",
)  # fmt: skip
# Counts the pictures that did not load, where the dumped page shows it.
PROBE = """<script>addEventListener("load", () => { const all = [...document.images];
document.body.dataset.images = all.length;
document.body.dataset.broken = all.filter(i => !i.complete || !i.naturalWidth).length; });</script></body>"""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (.ci/run installs it)"),
    pytest.mark.slow,
]


def look(page: Path, tmp_path: Path) -> tuple[list[str], int, int]:
    """Open `page` with a probe in it: console messages of errors, number of images, number of broken ones."""
    assert CHROMIUM is not None
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = re.findall(r"CONSOLE[^\n]*", done.stderr)
    found = {name: re.search(rf'data-{name}="(\d+)"', done.stdout) for name in ("images", "broken")}
    assert all(found.values()), "the probe did not run"
    images, broken = (int(match[1]) for match in found.values() if match)
    return errors, images, broken


def test_the_papers_page_opens_without_a_complaint(tmp_path: Path) -> None:
    at = Places(tmp_path / "checkout")
    shutil.copytree(HERE.paper, at.paper, ignore=shutil.ignore_patterns("build"))
    shutil.copytree(HERE.figures, at.figures)
    errors, images, broken = look(webpage.build(at), tmp_path)
    assert (errors, broken) == ([], 0)
    assert images == len(list(at.figures.glob("*.png")))


def test_an_executed_notebooks_page_opens_without_a_complaint(tmp_path: Path) -> None:
    import base64

    picture = base64.b64encode((HERE.figures / "heatmap.png").read_bytes()).decode()
    output = nbformat.v4.new_output("display_data", data={"image/png": picture})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[output])])
    path = tmp_path / "run.ipynb"
    nbformat.write(notebook, path)
    execute._to_html(path)
    assert look(path.with_suffix(".html"), tmp_path) == ([], 1, 0)


def test_the_probe_sees_a_broken_picture_and_an_error(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<html><body><img src="gone.png"><script>nothing.here()</script></body></html>', encoding="utf-8")
    errors, images, broken = look(page, tmp_path)
    assert (len(errors) >= 1, images, broken) == (True, 1, 1)
