"""A page of HTML that needs nothing else: no scripts, no files, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid var(--line) }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; opacity: .8; margin: .3em 0 }
.passed { color: #1a7f37 } .failed { color: #cf222e } .unsupported { color: #9a6700 }
svg { max-width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: currentColor }
@media (prefers-color-scheme: dark) {
  .passed { color: #3fb950 } .failed { color: #f85149 } .unsupported { color: #d29922 } }
"""


def page(title: str, *body: str) -> str:
    """The page; ``body`` is HTML."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
    )
    return f"{head}<body><h1>{escape(title)}</h1>{''.join(body)}</body></html>\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text, whose columns but the first have numbers."""

    def row(cells: Sequence[str], tag: str) -> str:
        name, *numbers = map(escape, cells)
        rest = "".join(f'<{tag} class="number">{number}</{tag}>' for number in numbers)
        return f"<{tag}>{name}</{tag}>{rest}"

    lines = [f"<tr>{row(cells, 'td')}</tr>" for cells in rows]
    return f"<table><tr>{row(head, 'th')}</tr>{''.join(lines)}</table>"
