"""Draws the picture of the README from the tables of `benchmarks/results/decode.md`.

    python -m benchmarks.plots

The program writes `docs/decode.svg`. All figures and conditions are read from `decode.md`.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decode.md"
PICTURE = ROOT / "docs" / "decode.svg"

PANELS = (("Decode", "135M"), ("Decode", "600M"), ("Prefill", "600M"))
"""First word of a section's heading in `decode.md`, and a column of the section's table."""

OURS = "parallelformers_ng"
LABELS, PANEL, BAR, GAP, TOP, BOTTOM = 300, 190, 16, 8, 34, 40  # pixels
GREY, BLUE, TEXT = "#9aa4b2", "#2563eb", "#24292f"


def main() -> None:
    PICTURE.write_text(draw(RESULTS.read_text()))
    print(f"wrote {PICTURE.relative_to(ROOT)}")


def draw(results: str) -> str:
    """Return the picture as SVG, with a row for each contestant and a panel for each of PANELS.

    Args:
        results: the text of `decode.md`.
    """
    tables = [(title, size, table(results, title)) for title, size in PANELS]
    contestants = list(tables[0][2])
    width, height = LABELS + PANEL * len(tables), TOP + len(contestants) * (BAR + GAP) + BOTTOM
    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for index, name in enumerate(contestants):
        weight = "bold" if OURS in name else "normal"
        parts.append(_text(LABELS - 10, _middle(index), name, anchor="end", weight=weight))
    for column, (title, size, figures) in enumerate(tables):
        left = LABELS + column * PANEL
        most = max(float(row[size]) for row in figures.values() if _is_number(row[size]))
        parts.append(_text(left, 18, f"{title}, {size}: tokens/s", weight="bold"))
        for index, name in enumerate(contestants):
            median, length, colour = figures[name][size], 0.0, BLUE if OURS in name else GREY
            if _is_number(median):
                length = round((PANEL - 60) * float(median) / most, 1)
            top = TOP + index * (BAR + GAP)
            parts.append(f'<rect x="{left}" y="{top}" width="{length}" height="{BAR}" fill="{colour}"/>')
            parts.append(_text(left + length + 5, _middle(index), median))
    parts.append(_text(10, height - 12, f"Median of the rounds, batch 1. {conditions(results)}. No GPU.", size=11))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def table(results: str, title: str) -> dict[str, dict[str, str]]:
    """Return the first table of a section: contestant → column → median, or the reason why no median exists.

    Raises:
        ValueError: the section does not exist, or has no table.
    """
    section = next((part for part in results.split("\n## ") if part.startswith(title)), "")
    lines = [line for line in section.splitlines() if line.startswith("|")]
    if not lines:
        raise ValueError(f"decode.md has no table under a heading that begins with {title!r}")
    head, _line, *rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines]
    return {
        cells[0]: {name: _median(cell) for name, cell in zip(head[1:], cells[1:], strict=True)}
        for cells in rows
        if not cells[0].startswith("against")
    }


def conditions(results: str) -> str:
    """Return the first sentence of `decode.md`: date, machine and versions."""
    return results.split("\n\n")[1].partition("\n")[0].rstrip(".")


def _median(cell: str) -> str:
    """Format a cell `best / median`; return a cell of words unchanged."""
    return re.sub(r"^[\d.]+ / ([\d.]+)$", r"\1", cell).replace("–", "not measured")


def _is_number(text: str) -> bool:
    return text[:1].isdigit()


def _middle(index: int) -> float:
    return TOP + index * (BAR + GAP) + BAR / 2 + 4


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", size: int = 12) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" fill="{TEXT}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
