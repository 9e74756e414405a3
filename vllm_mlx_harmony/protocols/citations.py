"""Citations of web pages, as OpenAI's APIs have them: a link in the text, and its annotation."""

from __future__ import annotations

from urllib.parse import urlsplit

from vllm_mlx_harmony.core.deltas import Citation
from vllm_mlx_harmony.protocols.events import Document


def link(citation: Citation) -> str:
    """The text in place of what the model wrote: a link in Markdown, after a space."""
    site = urlsplit(citation.url).netloc.removeprefix("www.")
    url = citation.url.replace("(", "%28").replace(")", "%29")
    return f" ([{site}]({url}))"


def span(citation: Citation, end: int) -> Document:
    """The place of a citation whose `link` ends at character ``end`` of its text, and its page."""
    start = end - len(link(citation)) + 1  # after the space
    place = {"start_index": start, "end_index": end}
    return {**place, "title": citation.title, "url": citation.url}
