"""A small SVG writer: shapes with CSS classes, in colours for light and for dark pages."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

FONT = "ui-sans-serif, system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
CHARACTER = 0.56  # width of an average character over its size

# Class -> (property, light, dark).  c0 to c7 are eight hues in order; a cell's text is `on`.
PALETTE = {
    "bg": ("fill", "#ffffff", "#0d1117"),
    "text": ("fill", "#1f2328", "#e6edf3"),
    "faint": ("fill", "#59636e", "#9198a1"),
    "on": ("fill", "#101418", "#f0f6fc"),
    "line": ("stroke", "#b8c0c8", "#3d444d"),
    "edge": ("stroke", "#57606a", "#0d1117"),
    "strong": ("stroke", "#1f2328", "#e6edf3"),
    "bad": ("stroke", "#c1121f", "#ff6b6b"),
    "warning": ("fill", "#c1121f", "#ff6b6b"),
    "empty": ("fill", "#eef0f2", "#1b2129"),
    "c0": ("fill", "#a8cbff", "#1f4e8c"),
    "c1": ("fill", "#ffd8a8", "#7a4a12"),
    "c2": ("fill", "#b2e6c0", "#1d5c36"),
    "c3": ("fill", "#f6b8c6", "#7d2a44"),
    "c4": ("fill", "#d3c2f5", "#4e3a86"),
    "c5": ("fill", "#f3e59a", "#665a12"),
    "c6": ("fill", "#a9e3e6", "#175a61"),
    "c7": ("fill", "#d6d0c4", "#57503f"),
}


def stylesheet() -> str:
    """CSS of the classes, for light pages and, where the reader prefers them, dark ones."""

    def rules(shade: int) -> str:
        return " ".join(f".{name} {{{p[0]}: {p[shade]}}}" for name, p in PALETTE.items())

    fixed = f"text {{font-family: {FONT}}} .line, .edge, .strong, .bad {{fill: none}}"
    return f"{fixed} {rules(1)} @media (prefers-color-scheme: dark) {{{rules(2)}}}"


def width_of(text: str, size: float) -> float:
    """About how wide a text is."""
    return len(text) * size * CHARACTER


class Picture:
    """Shapes in the order in which they are drawn; coordinates in pixels from the upper left."""

    def __init__(self, title: str, description: str):
        self.title, self.description = title, description
        self.parts: list[str] = []
        self.width = self.height = 0.0

    def rect(
        self, x: float, y: float, w: float, h: float, css: str, *, note: str = "", stroke: float = 0
    ) -> None:
        """A rectangle; the note is what a pointer over it shows; stroke: width of the outline."""
        outline = f' stroke-width="{_n(stroke)}"' if stroke else ""
        shape = (
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" class="{css}"{outline}'
        )
        self.parts.append(f"{shape}><title>{escape(note)}</title></rect>" if note else f"{shape}/>")
        self._reach(x + w, y + h)

    def text(
        self, x: float, y: float, words: str, *, size: float = 13, css: str = "text",
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        """Words on a base line; anchor: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" class="{css}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )
        end = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        self._reach(x + end * width_of(words, size), y + size / 3)

    def line(
        self, points: list[tuple[float, float]], css: str = "line", *, width: float = 1,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        """Straight lines from point to point."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" class="{css}" stroke-width="{_n(width)}"{dash}/>'
        )

    def legend(self, x: float, y: float, entries: list[tuple[str, str]], limit: float) -> float:
        """Coloured squares with words, in lines up to `limit` wide; returns the y below."""
        at = x
        for css, words in entries:
            wide = 20 + width_of(words, 13) + 18
            if at > x and at + wide > limit:
                at, y = x, y + 22
            self.rect(at, y - 11, 14, 14, css)
            self.text(at + 20, y, words)
            at += wide
        return y + 22

    def render(self, margin: float = 16) -> str:
        """The whole document."""
        w, h = _n(self.width + margin), _n(self.height + margin)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
            f'role="img" aria-label={quoteattr(self.title)}>\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n"
            f"<style>{stylesheet()}</style>\n"
            f'<rect width="100%" height="100%" class="bg"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)


def in_colours_of(document: str, *, dark: bool) -> str:
    """The document with one set of colours only, for a renderer that doesn't know media queries."""
    inside = re.search(r"@media \(prefers-color-scheme: dark\) \{(.*)\}</style>", document)
    if inside is None:
        raise ValueError("not a picture of this module: it has no dark colours")
    rules = inside[1] if dark else ""
    return document.replace(inside[0], f"{rules}</style>")


def _n(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")
