"""Turns a page into lines of text and links.

As in the browser that gpt-oss was trained with, the text is that of the page's blocks, wrapped, and
a link is ``【number†text】``, or ``【number†text†site】`` if it leads to another site. What is not
content is left out: scripts, forms, what is hidden and, if there is enough besides, navigation.

lxml parses the page, and only its beginning is read (`fetching.MAX_BYTES`). The tree is walked
without recursion, because a page may be nested as deeply as it is long.
"""

from __future__ import annotations

import codecs
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from urllib.parse import urljoin, urlsplit

from lxml import etree, html

from vllm_mlx_harmony.core.pages import without_marks
from vllm_mlx_harmony.server.tools.browser.fetching import MAX_URL, Fetched
from vllm_mlx_harmony.server.tools.tool_server import ToolError

WIDTH = 80
"""Characters of a line, as in the model's training."""

MAX_TEXT = 500_000
"""Characters of a page's text that are read: about as much as the model's context can hold."""

MAX_ELEMENTS = 100_000
"""Elements of a page that are read, in about a second."""

MAX_LINES = 20_000
"""Lines of a page that are read. Full ones reach ``MAX_TEXT`` after 6,250: this limit is for those
that are short or empty."""

MAX_LINKS = 5_000
"""Different links of a page that can be opened. Of the rest, only the text is shown."""

ENOUGH = 400
"""Characters of a page's main part that make the rest unnecessary."""

NOTHING, CUT = "[the page has no text]", "[the page is longer than what was read of it]"


@dataclass(frozen=True, slots=True)
class Document:
    """A page as text. Link ``n`` leads to ``links[n]``."""

    url: str
    title: str
    lines: tuple[str, ...]
    links: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """About its size in memory, in bytes."""
        strings = (self.url, self.title, *self.lines, *self.links)
        return 4 * sum(map(len, strings)) + 64 * len(strings)


def read(fetched: Fetched, *, source: bool = False) -> Document:
    """The page that was fetched; with ``source``, as it was sent.

    Raises ``ToolError`` for what is not text. Takes up to a second or so: call it in a thread.
    """
    kind, url = fetched.content_type, fetched.url
    if kind in _HTML or (not kind and fetched.content.lstrip()[:1] == b"<"):
        if source:
            document = Document(url, _title(url), _lines(without_marks(_text(fetched))))
        else:
            document = _read_html(fetched) or Document(url, _title(url), (NOTHING,))
    elif kind.startswith("text/") or kind.endswith(_TEXTUAL) or not kind:
        text = _text(fetched)
        if kind.endswith("json") and not source:
            text = _indented(text)
        document = Document(url, _title(url), _lines(without_marks(text)))
    else:
        raise ToolError(f"the page is not text but {kind[:100]}", "unsupported_content_type")
    if not fetched.cut or document.lines[-1] == CUT:
        return document
    return Document(url, document.title, (*document.lines, CUT), document.links)


_HTML = ("text/html", "application/xhtml+xml")
_TEXTUAL = ("json", "xml", "yaml", "javascript")


def wrapped(text: str) -> list[str]:
    """``text`` as lines of at most ``WIDTH`` characters."""
    lines = chain.from_iterable(
        textwrap.wrap(line, WIDTH, replace_whitespace=False) or [""]
        for line in _printable(text).split("\n")
    )
    return [line.rstrip() for line in lines]


def _lines(text: str) -> tuple[str, ...]:
    lines = wrapped(text[:MAX_TEXT])
    if len(lines) >= MAX_LINES or len(text) > MAX_TEXT:
        lines[MAX_LINES - 1 :] = []
        lines.append(CUT)
    return tuple(lines)


def _printable(text: str) -> str:
    """``text`` without control characters, with line feeds alone as line ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    # More blanks than a line has mean nothing, and `textwrap` takes quadratic time for them.
    return _BLANKS.sub(" " * WIDTH, _CONTROL.sub("", text))


_BLANKS = re.compile(rf" {{{WIDTH},}}")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u2028\u2029\ufeff]")


def _text(fetched: Fetched) -> str:
    """The text of what was fetched, whatever its server says about the encoding."""
    charset = fetched.charset or "utf-8"
    try:
        codecs.lookup(charset)
        return fetched.content.decode(charset, "replace")
    except (LookupError, ValueError, TypeError):  # unknown, or not an encoding of text
        return fetched.content.decode("utf-8", "replace")


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _title(url: str) -> str:
    return urlsplit(url).path.rpartition("/")[2] or urlsplit(url).netloc


def _site(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2].lower()


# --- HTML


def _read_html(fetched: Fetched) -> Document | None:
    """The page as text; ``None`` if it has none."""
    charset = fetched.charset
    try:
        parser = html.HTMLParser(encoding=charset, remove_comments=True, remove_pis=True)
    except LookupError:  # an encoding that libxml2 does not know
        parser = html.HTMLParser(remove_comments=True, remove_pis=True)
    try:
        root = etree.fromstring(fetched.content, parser)
    except (etree.LxmlError, ValueError):
        return None
    if root is None:
        return None
    title = next(iter(root.xpath("string(//title)").split("\n\n")), "")
    title = " ".join(without_marks(_printable(title)).split()) or _title(fetched.url)
    base = fetched.url
    for written in root.xpath("//base/@href")[:1]:
        base = _joined(base, str(written)) or base
    for part in _parts(root):
        walk = _Walk(base, fetched.url)
        text = walk.text(part)
        if part is root or len(text) >= ENOUGH:
            lines = _tidy(text)
            if walk.cut and lines[-1:] != (CUT,):
                lines = (*lines, CUT)
            return Document(fetched.url, title, lines, tuple(walk.links)) if lines else None
    return None


def _parts(root: etree._Element) -> Iterator[etree._Element]:
    """The main part of a page, if it says which it is, and the page."""
    main = root.xpath("//main | //*[@role='main']")
    articles = root.xpath("//article")
    yield from main[:1]
    if len(articles) == 1:
        yield articles[0]
    yield root


def _tidy(text: str) -> tuple[str, ...]:
    """``text`` as lines, without repeated empty ones."""
    text = re.sub(r"[ \t]*\n( (?=\S))?", "\n", text.strip())
    return _lines(re.sub(r"\n{3,}", "\n\n", text)) if text else ()


_OMITTED = frozenset(
    (
        *("script", "style", "noscript", "template", "svg", "math", "canvas", "iframe", "object"),
        *("embed", "audio", "video", "head", "nav", "footer"),
        *("button", "input", "select", "textarea", "dialog"),
    )
)
_BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div"),
        *("dl", "dt", "fieldset", "figcaption", "figure", "form", "header", "hr", "html", "li"),
        *("main", "ol", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead"),
        *("tr", "ul"),
    )
)
_HEADINGS = {f"h{level}": "#" * level for level in range(1, 7)}


class _Walk:
    """Writes the text of an element, and collects its links."""

    def __init__(self, base: str, url: str) -> None:
        self._base, self._site = base, _site(url)
        self._numbers: dict[str, int] = {}
        self._urls: dict[str, str] = {}  # by what is written in the page
        self._parts: list[str] = []
        self._length = 0
        self.cut = False
        self._preformatted = 0
        self._omitted: etree._Element | None = None
        self._open_links: list[tuple[etree._Element, str, int]] = []

    @property
    def links(self) -> Sequence[str]:
        return list(self._numbers)

    def text(self, root: etree._Element) -> str:
        walk = etree.iterwalk(root, events=("start", "end"))
        for number, (event, element) in enumerate(walk):
            if self._length > MAX_TEXT or number > 2 * MAX_ELEMENTS:
                self.cut = True
                break
            if self._omitted is not None:
                if event == "end" and element is self._omitted:
                    self._omitted = None
                    self._write(element.tail if element is not root else None)
            elif event == "start":
                self._start(element)
            else:
                self._end(element)
                self._write(element.tail if element is not root else None)
        return "".join(self._parts)

    def _start(self, element: etree._Element) -> None:
        tag = element.tag if isinstance(element.tag, str) else ""
        hidden = element.get("hidden") is not None or element.get("aria-hidden") == "true"
        if tag in _OMITTED or hidden:
            self._omitted = element
            return
        if tag in _HEADINGS:
            self._parts.append(f"\n\n{_HEADINGS[tag]} ")
        elif tag == "li":
            self._parts.append("\n* ")
        elif tag == "tr":
            self._parts.append("\n")
        elif tag in ("td", "th"):
            self._parts.append(" | ")
        elif tag == "br":
            self._parts.append("\n")
        elif tag in _BLOCKS:
            self._parts.append("\n\n")
        self._preformatted += tag == "pre"
        if tag == "a" and (url := self._url(element.get("href") or "")):
            self._open_links.append((element, url, len(self._parts)))
        if tag == "img" and (about := (element.get("alt") or "").strip()):
            self._write(f"[Image: {about[:200]}]")
        self._write(element.text)

    def _end(self, element: etree._Element) -> None:
        tag = element.tag if isinstance(element.tag, str) else ""
        if self._open_links and self._open_links[-1][0] is element:
            _, url, begin = self._open_links.pop()
            label = " ".join("".join(self._parts[begin:]).replace("†", "‡").split())
            if label and "【" not in label:
                del self._parts[begin:]
                self._parts.append(self._link(url, label))
        self._preformatted -= tag == "pre"
        if tag in _HEADINGS or (tag in _BLOCKS and tag not in ("li", "tr")):
            self._parts.append("\n\n")

    def _url(self, link: str) -> str:
        """The URL that ``link`` leads to; empty if it cannot be opened, or for too many links."""
        if link not in self._urls and len(self._urls) < MAX_LINKS:
            self._urls[link] = _joined(self._base, link)
        return self._urls.get(link, "")

    def _link(self, url: str, label: str) -> str:
        number = self._numbers.setdefault(url, len(self._numbers))
        site = _site(url)
        return f"【{number}†{label}】" if site == self._site else f"【{number}†{label}†{site}】"

    def _write(self, text: str | None) -> None:
        if not text:
            return
        text = without_marks(text)
        self._length += len(text)
        self._parts.append(text if self._preformatted else re.sub(r"\s+", " ", text))


def _joined(base: str, link: str) -> str:
    """The URL of a link that can be opened, without its fragment; empty for any other."""
    link = link.strip()
    if not link or link.startswith("#"):
        return ""
    try:
        url = urljoin(base, link).partition("#")[0]
        scheme = urlsplit(url).scheme
    except ValueError:
        return ""
    if scheme not in ("http", "https") or len(url) > MAX_URL or re.search(r"\s", url):
        return ""
    return url
