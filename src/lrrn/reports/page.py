"""A web page in one self-contained file: tables, charts and images, without scripts, fonts or other external resources."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#a37400")
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 44
SHADES = 60
"""Number of shades of an image from white to its strongest colour. A small number keeps files small."""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --faint: #3d444d; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 84rem; margin: 2rem auto;
  padding: 0 1rem; }
p { max-width: 60rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--faint); text-align: right; }
th:first-child, td:first-child, .meaning { text-align: left; } .meaning { font-size: .9rem; font-weight: normal; }
tr:has(.meaning) > :first-child { white-space: nowrap; }
.wide { overflow-x: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 1rem 0; max-width: 52rem; } figcaption { font-size: .9rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 13px; }
svg .axis { stroke: var(--ink); } svg .grid { stroke: var(--faint); }
img { image-rendering: pixelated; max-width: 100%; height: auto; }
"""


@final
class Page:
    """Collects parts and writes them as one HTML file, under a title that is the first heading too."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Add a heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], meanings: Sequence[str] | None = None) -> None:
        """Add a table; ``meanings`` are sentences that explain the rows, in a last column."""
        head = "".join(f"<th scope=col>{escape(column)}</th>" for column in columns)
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        if meanings is not None:
            head += "<th scope=col class=meaning>meaning</th>"
            cells = [f"{row}<td class=meaning>{escape(text)}</td>" for row, text in zip(cells, meanings, strict=True)]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        self._parts.append(f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")

    def lines(
        self, caption: str, x: str, y: str, series: Mapping[str, tuple[ArrayLike, ArrayLike]], log_y: bool = False
    ) -> None:
        """Add a line chart. ``series`` maps names to points, given as two sequences."""
        self._parts.append(_figure(caption, _lines(x, y, series, log_y, True)))

    def histograms(self, caption: str, x: str, series: Mapping[str, ArrayLike], bins: int = 40) -> None:
        """Add a chart of the histograms of several samples, on common bins that cover 99 % of all values."""
        values = {name: np.asarray(sample, float) for name, sample in series.items()}
        low, high = np.quantile(np.concatenate(list(values.values())), [0.0, 0.99])
        edges = np.linspace(low, high if high > low else low + 1, bins + 1)
        curves = {}
        for name, sample in values.items():
            share = np.histogram(sample, edges)[0] / len(sample)
            curves[name] = (np.repeat(edges, 2)[1:-1], np.repeat(share, 2))
        self._parts.append(_figure(caption, _chart(x, "share of samples", curves, False, True)))

    def images(self, caption: str, images: NDArray[Any], columns: int = 16, zoom: int = 4) -> None:
        """Add a grid of images of shape (n, height, width), each scaled separately: blue is negative, red is positive.

        Colour images, of shape (n, 3, height, width), are shown around grey, which is zero.
        """
        pixels = sheet(images, columns)
        self.picture(caption, png(pixels), f"width={pixels.shape[1] * zoom} height={pixels.shape[0] * zoom}")

    def picture(self, caption: str, content: bytes, size: str = "") -> None:
        """Add a PNG or SVG file, embedded."""
        kind = "png" if content.startswith(b"\x89PNG") else "svg+xml"
        data = base64.b64encode(content).decode()
        self._parts.append(_figure(caption, f'<img alt="{escape(caption)}" {size} src="data:image/{kind};base64,{data}">'))

    def html(self) -> str:
        """Return the page; figures that follow each other stand side by side where there is room."""
        parts = []
        for is_figure, group in groupby(self._parts, lambda part: part.startswith("<figure>")):
            content = "\n".join(group)
            parts.append(f"<div class=figures>{content}</div>" if is_figure else content)
        title, body = escape(self._title), "\n".join(parts)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n{body}\n</body></html>\n"
        )


def _figure(caption: str, content: str) -> str:
    return f"<figure>{content}<figcaption>{escape(caption)}</figcaption></figure>"


def line_chart(
    x: str, y: str, series: Mapping[str, tuple[ArrayLike, ArrayLike]], log_y: bool = False, zero: bool = True
) -> bytes:
    """Return a line chart as a standalone SVG file; ``zero`` makes the vertical axis begin at zero."""
    style = "text{font:13px system-ui,sans-serif;fill:#1b1f24}.axis{stroke:#1b1f24}.grid{stroke:#d0d7de}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" height="{HEIGHT}" '
    chart = _lines(x, y, series, log_y, zero).replace("<svg ", head, 1).replace(">", f"><style>{style}</style>", 1)
    return (chart.replace("<style>", '<rect width="100%" height="100%" fill="#fff"/><style>', 1) + "\n").encode()


def _lines(x: str, y: str, series: Mapping[str, tuple[ArrayLike, ArrayLike]], log_y: bool, zero: bool) -> str:
    curves = {name: (np.asarray(xs, float), np.asarray(ys, float)) for name, (xs, ys) in series.items()}
    if log_y:
        curves = {name: (xs[ys > 0], np.log10(ys[ys > 0])) for name, (xs, ys) in curves.items()}
    return _chart(x, y, curves, log_y, zero)


def _chart(x: str, y: str, curves: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], log_y: bool, zero: bool) -> str:
    drawn = {name: (xs, ys) for name, (xs, ys) in curves.items() if len(xs)}
    if not drawn:
        return "<p>no points</p>"
    all_x, all_y = (np.concatenate([curve[axis] for curve in drawn.values()]) for axis in (0, 1))
    (x0, x1), (y0, y1) = _limits(all_x), _limits(np.append(all_y, 0.0) if zero and not log_y else all_y)

    def place(px: Any, py: Any) -> tuple[Any, Any]:
        across = LEFT + (px - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y1 - py) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in _ticks(x0, x1):
        across = place(tick, y0)[0]
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(y0, y1):
        down = place(x0, tick)[1]
        label = f"{10**tick:.2g}" if log_y else f"{tick:g}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{label}</text>')
    bottom = HEIGHT - BOTTOM
    parts.append(f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text transform="translate(12 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y)}</text>')
    for index, (name, (xs, ys)) in enumerate(drawn.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in zip(*place(xs, ys), strict=True))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT - 4}" y="{TOP + 16 + 17 * index}" text-anchor="end" style="fill:{colour}">')
        parts.append(f"{escape(name)}</text>")
    label = escape(f"{y} against {x}: {', '.join(drawn)}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _limits(values: NDArray[Any]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers within the limits."""
    rough = (high - low) / 5
    unit = 10.0 ** np.floor(np.log10(rough))
    step = unit * min((1, 2, 5, 10), key=lambda multiple: abs(multiple * unit - rough))
    first = int(np.ceil(low / step - 1e-9))
    return [round(index * step, 12) for index in range(first, int(np.floor(high / step + 1e-9)) + 1)]


def sheet(images: NDArray[Any], columns: int) -> NDArray[np.uint8]:
    """Arrange images in a grid for :func:`png`, each scaled separately.

    Images of shape (n, height, width) become shades, those of shape (n, 3, height, width) colours.
    """
    n, *colours, height, width = images.shape
    rows = -(-n // columns)
    zero, blank = (127.5, 255) if colours else (SHADES, SHADES)
    pixels = np.full((rows * (height + 1), min(columns, n) * (width + 1), *colours), blank, np.uint8)
    for index, image in enumerate(images):
        shades = np.rint(zero * (1 + image / max(float(np.abs(image).max()), 1e-30)))
        top, left = index // columns * (height + 1), index % columns * (width + 1)
        pixels[top : top + height, left : left + width] = np.moveaxis(shades, 0, -1) if colours else shades
    return pixels


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode shades of shape (height, width): 0 is blue, ``SHADES`` white, twice that red. Colours have a last axis of 3."""
    height, width = pixels.shape[:2]

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    fade = np.rint(np.linspace(0, 255, SHADES + 1)).astype(np.uint8)
    full = np.full_like(fade, 255)
    blue, red = np.stack([fade, fade, full], -1), np.stack([full, fade, fade], -1)[-2::-1]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    kind, palette = (3, chunk(b"PLTE", np.concatenate([blue, red]).tobytes())) if pixels.ndim == 2 else (2, b"")
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    parts = header + palette + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
