"""How the paper becomes one HTML file that opens from disk: both abstracts, every table, every figure, no script."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decodegap import records, render, typeset
from decodegap.errors import BadInputError
from decodegap.paths import HERE, Places

TITLE = "Where Does a Decode Step Go?"
# What the abstracts use of TeX beside the generated macros: a percent sign, an empty group, a dash, a space.
PLAIN = {"\\%": "%", "{}": "", "---": "—", "--": "–", "~": " ", "``": "“", "''": "”"}
PRINTED = {tex: character for character, tex in render.LATEX.items() if character.strip()}
WIDEST_PX = 940  # of a figure as wide as the text; the others in proportion
STYLE = """
body { font: 16px/1.5 Georgia, "Nanum Myeongjo", serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #111; background: #fff; }
table { border-collapse: collapse; font: 12px/1.4 system-ui, sans-serif; display: block; overflow-x: auto; }
th, td { padding: 0.15rem 0.5rem; border-bottom: 1px solid #ddd; text-align: left; }
img { max-width: 100%; height: auto; }
h1, h2 { line-height: 1.2; }
.jp-InputPrompt, .jp-OutputPrompt, .prompt, .anchor-link { display: none; }
"""


def build(at: Places = HERE) -> Path:
    """Write `paper/paper.html` and return it. Raises `BadInputError` for an undefined macro."""
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.v4.new_notebook(cells=list(_cells(at)))
    body, _ = HTMLExporter(template_name="basic", embed_images=True, exclude_input=True).from_notebook_node(notebook)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{TITLE}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
    names = iter(figure.stem for figure in _figures(at))
    page = re.sub(r'alt="No description[^"]*"', lambda _: f'alt="figure {next(names)}"', page)
    target = at.paper / "paper.html"
    records.write_atomically(target, _without_random_ids(page).encode())
    return target


def abstract(name: str, at: Places = HERE) -> str:
    """An abstract as plain text, its macros replaced. Raises `BadInputError` for one that is not defined."""
    return plain((at.paper / f"{name}.tex").read_text(encoding="utf-8"), typeset.macros(at), f"paper/{name}.tex")


def plain(text: str, macros: dict[str, str], where: str) -> str:
    """TeX `text` without comments, macros replaced and the little TeX of an abstract undone."""
    text = re.sub(r"(?<!\\)%.*", "", text)

    def value(match: re.Match[str]) -> str:
        if match[1] not in macros:
            raise BadInputError(f"{where}: \\{match[1]} is not among the generated numbers; run `make tables`")
        text = macros[match[1]]
        for tex, character in PRINTED.items():
            text = text.replace(tex, character)
        return text

    text = re.sub(r"\\([A-Za-z]+)(?:\{\})?", value, text)
    for tex, character in (*PLAIN.items(), ("\\", "")):
        text = text.replace(tex, character)
    return " ".join(text.split())


def _cells(at: Places) -> Iterator[Any]:
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

    def markdown(text: str) -> Any:
        return new_markdown_cell(text)

    yield markdown(f"# {TITLE}\n\nA reproduction report. Every number below is generated from records.")
    yield markdown(f"## Abstract\n\n{abstract('abstract_en', at)}")
    yield markdown(f"## 초록\n\n{abstract('abstract_ko', at)}")
    widest = max(map(_width, _figures(at)), default=1)
    for figure in _figures(at):
        yield markdown(f"## Figure: {figure.stem}")
        data = {"image/png": base64.b64encode(figure.read_bytes()).decode(), "text/plain": f"figure {figure.stem}"}
        metadata = {"image/png": {"width": round(WIDEST_PX * _width(figure) / widest)}}
        output = new_output("display_data", data=data, metadata=metadata)
        yield new_code_cell("", outputs=[output])
    for table in sorted(at.generated.glob("*.md")):
        yield markdown(f"## Table: {table.stem}\n\n{table.read_text(encoding='utf-8')}")


def _figures(at: Places) -> list[Path]:
    return sorted(at.figures.glob("*.png"))


def _width(png: Path) -> int:
    """Width in pixels, from the PNG's header."""
    return int.from_bytes(png.read_bytes()[16:20], "big")


def _without_random_ids(page: str) -> str:
    """`page` without the random cell ids of a notebook, so that the same records give the same bytes."""
    return re.sub(r'id="cell-id=[^"]*"', "", page)
