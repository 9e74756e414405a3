"""Pages as the browser shows them to gpt-oss, and the citations in what the model writes.

gpt-oss was trained with a browser (https://github.com/openai/gpt-oss, ``simple_browser``). Each of
its results shows a part of a page under a **cursor**, a number that later calls and citations refer
to::

    [3] Rome (https://en.wikipedia.org/wiki/Rome)
    **viewing lines [20 - 21] of 310**

    L20: Rome is the capital of 【4†Italy】. It has 2.8 million
    L21: inhabitants.

``【4†Italy】`` is link 4 of that page; a link to another site has its name, too
(``【5†Colosseum†whc.unesco.org】``). The results of a search are such a page without a URL, in
which each result begins with its link and its URL.

A citation is ``【3†L20-L21】``. What it refers to is read back from the results in the
conversation, so that nothing has to be stored beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_mlx_harmony.core.deltas import (
    Citation,
    Closed,
    Delta,
    Failed,
    Kind,
    Opened,
    Text,
    TextLogprob,
    ToolFinished,
    ToolStarted,
)
from vllm_mlx_harmony.core.turn import BROWSER, Answer, Message, Preamble, ServerResult

MAX_TITLE = 300
"""Characters of a title that are shown."""


@dataclass(frozen=True, slots=True)
class Found:
    """A result of a search. ``line`` is the number of its first line."""

    title: str
    url: str
    line: int


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a page: its ``lines`` from number ``first`` on, of ``total``.

    ``url`` is empty for the results of a search.
    """

    cursor: int
    title: str
    url: str
    first: int
    lines: tuple[str, ...]
    total: int

    @property
    def text(self) -> str:
        """The result of a call that shows the page."""
        title = " ".join(self.title.split())[:MAX_TITLE]
        if self.url:
            title = f"{title} ({self.url})"
        elif _HEADER_URL.search(title):
            title += " "  # a question with a URL at its end
        last = self.first + len(self.lines) - 1
        body = "\n".join(f"L{number}: {line}" for number, line in enumerate(self.lines, self.first))
        view = f"**viewing lines [{self.first} - {last}] of {self.total - 1}**"
        return f"[{self.cursor}] {title}\n{view}\n\n{body}"

    @property
    def found(self) -> tuple[Found, ...]:
        """The results of a search that are shown, each with its URL."""
        if self.url:
            return ()
        following = (*self.lines[1:], "")
        return tuple(
            Found(link[1], url, number)
            for number, (line, url) in enumerate(
                zip(self.lines, following, strict=True), self.first
            )
            if (link := _LINK.fullmatch(line)) and _URL.fullmatch(url)
        )

    def source(self, line: int | None) -> tuple[str, str]:
        """The URL and the title of what is cited at ``line``; the URL may be empty.

        Of a search, that is the result which the line belongs to.
        """
        if self.url:
            return self.url, self.title
        before = [result for result in self.found if line is not None and result.line <= line]
        return (before[-1].url, before[-1].title) if before else ("", "")

    def passage(self, first: int, last: int) -> str:
        """The text of lines ``first`` to ``last``, as far as they are shown, without links."""
        start, end = first - self.first, last - self.first + 1
        text = " ".join(self.lines[max(start, 0) : max(end, 0)])
        return " ".join(_LINK.sub(lambda link: link[1], text).split())


def results_page(
    cursor: int, query: str, results: Iterable[tuple[str, str, Sequence[str]]]
) -> Page:
    """The page of a search: the title, the URL and the lines of an extract of each result."""
    lines: list[str] = []
    for number, (title, url, extract) in enumerate(results):
        site = url.partition("://")[2].partition("/")[0]
        words = " ".join(without_marks(title).replace("†", "‡").split())[:MAX_TITLE]
        lines += [f"【{number}†{words or site}†{site}】", url, *extract, ""]
    lines = lines[:-1] or ["No results were found."]
    return Page(cursor, query, "", 0, tuple(lines), len(lines))


def read_page(text: str) -> Page | None:
    """The page that ``text`` shows; ``None`` if it has another form."""
    shown = _SHOWN.match(text)
    if shown is None:
        return None
    title, url = shown["title"], ""
    if linked := _HEADER_URL.search(title):
        title, url = title[: linked.start()], linked[1]
    lines = tuple(line[1] for line in _LINE.finditer(text, shown.end()))
    first, total = int(shown["first"]), int(shown["last"]) + 1
    return Page(int(shown["cursor"]), title.rstrip(), url, first, lines, total)


def without_marks(text: str) -> str:
    """``text`` of a page without the brackets of links and citations, which are the browser's."""
    return text.translate(_MARKS)


_MARKS = str.maketrans({"【": "〖", "】": "〗"})

_SHOWN = re.compile(
    r"\[(?P<cursor>\d{1,6})\] (?P<title>.*)\n"
    r"\*\*viewing lines \[(?P<first>\d{1,9}) - \d{1,9}\] of (?P<last>\d{1,9})\*\*\n\n"
)
_HEADER_URL = re.compile(r" \((https?://\S+)\)$")
_LINE = re.compile(r"^L\d{1,9}: (.*)$", re.MULTILINE)
_LINK = re.compile(r"【\d+†([^【】†]*)(?:†[^【】†]*)?】")
_URL = re.compile(r"https?://\S+")


# --- Citations

_CITATION = re.compile(r"【(\d{1,6})†(?:L(\d{1,9})(?:-L?(\d{1,9}))?|source)】")
_PARTIAL_CITATION = re.compile(
    r"【(?:\d{1,6}(?:†(?:L(?:\d{1,9}(?:-(?:L?\d{0,9})?)?)?|s(?:o(?:u(?:r(?:ce?)?)?)?)?)?)?)?$"
)
"""The beginning of a citation at the end of a text."""

MAX_PASSAGE = 150
"""Characters of a passage, as in Anthropic's API."""


class Citations:
    """Finds the citations in a turn, whose prompt shows ``pages``, by cursor.

    A citation of any other page remains text.
    """

    def __init__(self, pages: Mapping[int, Page] | None = None) -> None:
        self.pages = dict(pages or {})
        self._call = ""
        self._cites = False
        self._text = ""  # which may be the beginning of a citation
        self._logprobs: tuple[TextLogprob, ...] = ()

    def feed(self, deltas: Iterable[Delta]) -> list[Delta]:
        """``deltas`` with each citation as a `Citation`."""
        fed: list[Delta] = []
        for delta in deltas:
            match delta:
                case Text() if self._cites and self.pages:
                    fed += self._read(delta)
                    continue
                case Opened():
                    self._cites = delta.kind in (Kind.ANSWER, Kind.PREAMBLE)
                    self._call = delta.name
                case ToolStarted() if delta.call is not None:
                    self._call = delta.call.name
                case ToolFinished() if delta.failure is None:
                    self._add(self._call, delta.text)
                case Closed() | Failed() if self._text:
                    fed += self._piece(self._text)
                    self._text = ""
                case _:
                    pass
            fed.append(delta)
        return fed

    def rewrite(
        self, messages: Iterable[Message], write: Callable[[Citation], str]
    ) -> list[Message]:
        """``messages`` with the citations as a client receives them, which ``write`` returns."""
        rewritten: list[Message] = []
        for message in messages:
            if isinstance(message, ServerResult):
                self._add(message.name, message.text)
            if isinstance(message, (Answer, Preamble)) and self.pages:
                text = "".join(
                    part if isinstance(part, str) else write(part)
                    for part in self.split(message.text)
                )
                message = replace(message, text=text)  # noqa: PLW2901
            rewritten.append(message)
        return rewritten

    def split(self, text: str) -> list[str | Citation]:
        """The citations in ``text``, and the texts between them."""
        parts: list[str | Citation] = []
        end = 0
        for mark in _CITATION.finditer(text):
            cited = self._citation(mark)
            if cited is not None:
                if before := text[end : mark.start()]:
                    parts.append(before)
                parts.append(cited)
                end = mark.end()
        if rest := text[end:]:
            parts.append(rest)
        return parts

    def _read(self, delta: Text) -> list[Delta]:
        self._logprobs += delta.logprobs
        text = self._text + delta.text
        partial = _PARTIAL_CITATION.search(text)
        ready = text if partial is None else text[: partial.start()]
        self._text = text[len(ready) :]
        return self._piece(ready)

    def _piece(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        for part in self.split(text):
            logprobs, self._logprobs = self._logprobs, ()
            if isinstance(part, str):
                deltas.append(Text(part, logprobs))
            else:
                deltas.append(replace(part, logprobs=logprobs))
        return deltas

    def _add(self, name: str, text: str) -> None:
        if name.partition(".")[0] == BROWSER and (page := read_page(text)):
            self.pages[page.cursor] = page

    def _citation(self, mark: re.Match[str]) -> Citation | None:
        page = self.pages.get(int(mark[1]))
        if page is None:
            return None
        first = None if mark[2] is None else int(mark[2])
        url, title = page.source(first)
        if not url:
            return None
        passage = "" if first is None else page.passage(first, int(mark[3] or first))
        return Citation(mark[0], url, title or url, passage[:MAX_PASSAGE])
