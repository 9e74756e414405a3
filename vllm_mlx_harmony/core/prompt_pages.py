"""The pages that a prompt shows: those of replayed turns, too, whose messages a client may omit."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.pages import Page, read_page
from vllm_mlx_harmony.core.turn import BROWSER


def prompt_pages(ids: Sequence[int]) -> dict[int, Page]:
    """By cursor, the pages in the results of the browser's calls in a prompt.

    Only messages of the browser have them, which control tokens delimit: no other text is a page,
    whatever it looks like.
    """
    pages: dict[int, Page] = {}
    start: int | None = None
    for at, token in enumerate(ids):
        if token == vocab.START:
            start = at + 1
        elif token == vocab.MESSAGE and start is not None:
            header, start = _text(ids[start:at]), None
            if header.startswith(f"{BROWSER}."):
                end = next((n for n in range(at, len(ids)) if ids[n] in _ENDS), len(ids))
                page = read_page(_text(ids[at + 1 : end]))
                if page is not None:
                    pages[page.cursor] = page
    return pages


_ENDS = (vocab.END, vocab.START)


def _text(ids: Sequence[int]) -> str:
    plain = (vocab.token_bytes(token) for token in ids if token < vocab.STARTOFTEXT)
    return b"".join(plain).decode("utf-8", "replace")
