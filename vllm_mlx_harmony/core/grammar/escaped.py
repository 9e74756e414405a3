r"""Rewrites a grammar or a regular expression to match a text inside a JSON string.

A freeform tool is called with ``{"input": "…"}``, and its syntax describes the unescaped text. JSON
writes most characters as themselves, and escapes the quote, the backslash and control characters.
That replaces characters by words. No two characters share a word, and no word is a prefix of
another, so the replacement commutes with all operators of regular expressions and grammars, even
with complements (among sequences of such words). Hence only the leaves change: literals, character
classes and the dot. ``[^a]`` becomes ``(?:[[^a]&&[^"\\\x00-\x1f]]|\\"|\\\\|\\n|…)``, with the words
of the special characters in the class. Each has one word here, the shortest.

Everything else stays as it was written. The syntax of regular expressions is that of
https://docs.rs/regex; for Lark it is
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Constructs of llguidance that
refer to token ids are rejected, since they do not describe a text.

Whether llguidance can compile the result is found out by compiling it, in another process
(`server.grammar_checks`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from vllm_mlx_harmony.core import json_escapes

_SPECIAL = ('"', "\\", *map(chr, range(0x20)))
_PLAIN = r'[^"\\\x00-\x1f]'


class NotExpressible(ValueError):
    """A construct that cannot be rewritten. The message names it."""


def _word(character: str) -> str:
    """``character`` as JSON writes it inside a string."""
    if "\ud800" <= character <= "\udfff":
        raise NotExpressible("a character that UTF-8 does not have")
    if character not in _SPECIAL:
        return character
    short = json_escapes.REQUIRED.get(character)
    return f"\\{short}" if short else f"\\u{ord(character):04x}"


# --- Lark ---

MAX_DEPTH = 100
"""Definitions within definitions."""

MAX_EXPANDED = 10_000
"""The literals of a grammar that is rewritten as one terminal, which llguidance expands."""

_LEXEME = re.compile(
    r"""
    (?P<comment>(?:\#|//)[^\n]*)
  | (?P<space>\s+)
  | (?P<range>"(?:\\.|[^"\\\n])"\s*\.\.\s*"(?:\\.|[^"\\\n])")
  | (?P<string>"(?:\\.|[^"\\\n])*")(?P<cased>i?)
  | (?P<regex>/(?:\\.|[^/\\\n])+/)(?P<flags>[imslux]*)
  | (?P<import>%import\s+common(?:\s*\.)?\s*(?P<imported>\([^)]*\)|\w+)(?:\s*->\s*(?P<local>\w+))?)
  | (?P<directive>%(?:ignore|declare)\b)
  | (?P<refused><[^<>\s]+>|@[\w-]+|%\w+|~(?!\s*[0-9]))
  | (?P<alias>->\s*[\w-]+)
  | (?P<priority>(?<=\w)\.-?[0-9]+)
  | (?P<name>[!?]{0,2}[A-Za-z_][\w-]*)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


_INPUT = r"""
OPENING: /\{[ \n]{0,4}"input"[ ]?:[ ]?"/
CLOSING: /"[ \n]{0,4}\}/
"""


def inputs(definition: str) -> Iterator[str]:
    """Grammars of the JSON of a freeform tool whose input matches ``definition``, for use in
    ``%lark { … }``. Use the first one that llguidance accepts.

    Raises ``NotExpressible`` for constructs that cannot be rewritten, for token ids and other
    grammars, and for unbalanced braces.
    """
    lexemes = _lexemes(definition)
    ignores = any(lexeme.group() == "%ignore" for lexeme in lexemes)
    if not ignores and _expanded(lexemes) <= MAX_EXPANDED:
        written = "".join(_LarkRewriter(as_terminal=True).pieces(lexemes))
        yield f"start: ALL\nALL: OPENING R_START CLOSING{_INPUT}{written}"
    writing = _LarkRewriter(as_terminal=False)
    written = "".join(writing.pieces(lexemes))
    if not writing.is_ambiguous:
        yield f"start: OPENING r_start CLOSING{_INPUT}{written}"


def plain(definition: str) -> str:
    """``definition``, for use in ``%lark { … }``. Raises the same errors as ``inputs``."""
    lexemes = _lexemes(definition)
    return "".join(lexeme.group() for lexeme in lexemes if lexeme.lastgroup != "priority")


_DEFINES = re.compile(r"(?:\.-?[0-9]+)?\s*:")


def _expanded(lexemes: Iterable[re.Match[str]]) -> float:
    """The number of names and literals of a grammar once every name is replaced by its definition;
    infinite if definitions are recursive, or nested too deeply."""
    named: dict[str, list[str]] = {}
    defined = ""
    for lexeme in lexemes:
        name = lexeme.group().lstrip("!?") if lexeme.lastgroup == "name" else ""
        if name and _DEFINES.match(lexeme.string, lexeme.end()):
            defined = name
        elif name or lexeme.lastgroup in ("cased", "flags", "range"):
            named.setdefault(defined, []).append(name)
    sizes: dict[str, float] = {}

    def size(name: str, depth: int = 0) -> float:
        if name not in sizes:
            sizes[name] = math.inf  # while its definition is expanded, and if that is too deep
            if depth < MAX_DEPTH:
                sizes[name] = 1 + sum(size(inner, depth + 1) for inner in named.get(name, ()))
        return sizes[name]

    return max(map(size, named), default=0)


def _lexemes(definition: str) -> list[re.Match[str]]:
    lexemes, open_ = [], 0
    for lexeme in _LEXEME.finditer(definition):
        if lexeme.lastgroup == "refused":
            raise NotExpressible(f"{lexeme.group()} in a Lark grammar")
        if lexeme.lastgroup == "other":
            # Whatever follows would be searched for its end once more from each of its quotes.
            if lexeme.group() in ('"', "/"):
                raise NotExpressible("a string or expression without its end in a Lark grammar")
            open_ += {"{": 1, "}": -1}.get(lexeme.group(), 0)
            if open_ < 0:
                break
        if lexeme.lastgroup not in ("comment", "alias"):
            lexemes.append(lexeme)
    if open_:
        raise NotExpressible("an unmatched brace in a Lark grammar")
    return lexemes


class _LarkRewriter:
    """Rewrites a grammar with all literals escaped.

    With ``as_terminal`` every rule becomes a terminal, and the whole grammar a regular expression.
    This is exact, but llguidance accepts it only if no rule is recursive. As rules it may not be
    exact: the lexer does not look ahead, so it cannot tell a backslash that continues a text from
    that of an escaped line end after it. ``is_ambiguous`` is true if there is such a text.
    """

    def __init__(self, *, as_terminal: bool) -> None:
        self._as_terminal = as_terminal
        self.is_ambiguous = False

    def pieces(self, lexemes: Iterable[re.Match[str]]) -> Iterator[str]:
        for lexeme in lexemes:
            kind, text = lexeme.lastgroup, lexeme.group()
            if kind == "cased":
                literal = _read(lexeme["string"])
                if lexeme["cased"]:
                    yield self.regex(re.escape(literal), "i")
                else:
                    yield json.dumps("".join(map(_word, literal)), ensure_ascii=False)
            elif kind == "flags":
                yield self.regex(lexeme["regex"][1:-1].replace(r"\/", "/"), lexeme["flags"])
            elif kind == "range":
                first, last = map(_read, _STRING.findall(text))
                yield self.regex(f"[{re.escape(first)}-{re.escape(last)}]")
            elif kind == "import":
                yield from self.imported(lexeme)
            elif kind == "name":
                yield self.name(text)
            elif kind != "priority":
                yield text

    def name(self, name: str) -> str:
        bare = name.lstrip("!?")
        is_rule = bare.lstrip("_")[:1].islower()
        if self._as_terminal:
            return f"{'R' if is_rule else 'T'}_{bare.upper()}"
        return f"{'r' if is_rule else 'T'}_{bare}"

    def regex(self, pattern: str, flags: str = "") -> str:
        rewriting = PatternRewriter(pattern, flags)
        written = between_slashes("".join(rewriting.pieces()))
        self.is_ambiguous = self.is_ambiguous or rewriting.has_special_class
        return f"/{written}/"

    def imported(self, lexeme: re.Match[str]) -> Iterator[str]:
        names = re.findall(r"\w+", lexeme["imported"])
        for name in names:
            if name not in COMMON or (lexeme["local"] and len(names) != 1):
                raise NotExpressible(f"{lexeme.group()} in a Lark grammar")
            yield f"{self.name(lexeme['local'] or name)}: {self.regex(COMMON[name])}\n"


_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_HEX = re.compile(r"\\x([0-9a-fA-F]{2})")


def _read(literal: str) -> str:
    """The text of a quoted string with JSON's and hexadecimal escapes."""
    try:
        text = json.loads(_HEX.sub(r"\\u00\1", literal))
    except ValueError as error:
        raise NotExpressible(f"the string {literal} in a Lark grammar") from error
    return str(text)


_NUMBER = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"

COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": _NUMBER,
    "SIGNED_FLOAT": f"[+-]?(?:{_NUMBER})",
    "NUMBER": f"[0-9]+|{_NUMBER}",
    "SIGNED_NUMBER": f"[+-]?(?:[0-9]+|{_NUMBER})",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Lark's ``common`` terminals: https://github.com/lark-parser/lark (grammars/common.lark)."""


# --- regular expressions ---


def between_slashes(written: str) -> str:
    """A regular expression as written between two slashes.

    Lark does not allow a line feed there, nor one after a backslash, as ``re.escape`` writes it;
    and two slashes begin a comment.
    """
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    between = re.sub(r"\\.|[/\n]", lambda at: escapes.get(at[0], at[0]), written, flags=re.DOTALL)
    return between or "(?:)"


_PIECE = re.compile(
    r"""
    (?P<operator>[*+?|]|\{[0-9]+(?:,[0-9]*)?\})
  | (?P<open>\((?!\?)|\(\?(?:P?<(?![=!])\w+>|(?P<flags>[a-zA-Z]*(?:-[a-zA-Z]+)?)(?P<end>[:)])))
  | (?P<close>\))
  | (?P<dot>\.)
  | (?P<class>\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDwWsS]|\\[pP](?:\{[\w=&.\ ]+\}|[A-Z]))
  | (?P<code>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{(?:10|0?[0-9a-fA-F])?[0-9a-fA-F]{1,4}\}))
  | (?P<escape>\\(?:[ntrfva0]|[\W_]))
  | (?P<plain>[^\\([^$])
    """,
    re.VERBOSE | re.DOTALL,
)
CATEGORY = re.compile(r"\\[pP](?:\{(?P<long>[\w=&. ]+)\}|(?P<short>[A-Z]))")
END = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")
"""A ``$`` that ends a pattern."""
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_REJECTED = {"(": "look-around", "[": "an unterminated character class"}


class PatternRewriter:
    """Rewrites one pattern, and tracks the flags of its groups.

    Raises ``NotExpressible`` for constructs that depend on the text around the match (inner
    anchors, look-around, back references), and for unknown notations.
    """

    def __init__(self, pattern: str, flags: str) -> None:
        if set(flags) - set("isu"):
            raise NotExpressible(f"the flags {flags!r} of a regular expression")
        self._pattern = pattern
        self._flags = set(flags)
        self._groups: list[set[str]] = []
        self.has_special_class = False
        """Whether a class contains characters that JSON escapes."""

    def pieces(self) -> Iterator[str]:
        """The pattern for the escaped text, with flags at each leaf."""
        pattern = self._pattern
        at, end = int(pattern.startswith("^")), len(pattern) - bool(END.search(pattern))
        yield "(?:"
        while at < end:
            match = _PIECE.match(pattern, at, end)
            if not match:
                what = _REJECTED.get(pattern[at], pattern[at : at + 1 + (pattern[at] == "\\")])
                raise NotExpressible(f"{what} within a regular expression")
            yield self.piece(match)
            at = match.end()
        yield ")"

    def piece(self, match: re.Match[str]) -> str:
        """The rewritten construct."""
        kind, text = match.lastgroup, match.group()
        if kind == "open":
            on, _, off = (match["flags"] or "").partition("-")
            if set(on + off) - set("isu"):
                raise NotExpressible(f"{text} in a regular expression")
            if match["end"] != ")":
                self._groups.append(self._flags)
            self._flags = (self._flags | set(on)) - set(off)
            return "" if match["end"] == ")" else "(?:"
        if kind == "close":
            if not self._groups:
                raise NotExpressible("an unmatched parenthesis in a regular expression")
            self._flags = self._groups.pop()
            return ")"
        if kind in ("class", "dot"):
            dot = r"[\s\S]" if "s" in self._flags else r"[^\n]"
            return self.character_class(dot if kind == "dot" else text)
        if kind == "code":
            return self.character(chr(int(re.sub(r"[\\xu{}]", "", text), 16)))
        if kind in ("escape", "plain"):
            return self.character(_CONTROLS.get(text[1:], text[-1]))
        return text

    # Leaves

    def character(self, character: str) -> str:
        written = re.escape(_word(character))
        if character in _SPECIAL:
            return f"(?:{written})"
        return self.cased(written)

    def character_class(self, written: str) -> str:
        members = [special for special in _SPECIAL if _has(written, special)]
        if not members:
            return self.cased(written)
        self.has_special_class = True
        words = "|".join(re.escape(_word(member)) for member in members)
        return f"(?:{self.cased(f'[{written}&&{_PLAIN}]')}|{words})"

    def cased(self, written: str) -> str:
        return f"(?i:{written})" if "i" in self._flags else written


def _has(written: str, character: str) -> bool:
    """Whether a class, a dot or a category contains ``character``."""
    if not written.startswith("["):
        category = CATEGORY.fullmatch(written)
        if category:
            return _category_has(category, character)
        return re.fullmatch(written, character) is not None
    inner = written[1:-1].removeprefix("^")
    has = any(_category_has(category, character) for category in CATEGORY.finditer(inner))
    rest = CATEGORY.sub("", inner)
    if re.search(r"(?<!\\)(?:\\\\)*\[|&&|--|~~", rest):
        raise NotExpressible(f"the class {written} in a regular expression")
    rest = re.sub(r"\\x\{([0-9a-fA-F]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", rest)
    try:
        has = has or (rest != "" and re.fullmatch(f"[{rest}]", character) is not None)
    except re.error as error:
        raise NotExpressible(f"the class {written} in a regular expression") from error
    return has != written.startswith("[^")


_WITHOUT_SPECIALS = re.compile(
    "[LNMSZ][a-z]?|P[dseifc]|Letter|Alphabetic|Uppercase|Lowercase|Number|Mark|Symbol|Separator|"
    "Latin|Greek|Cyrillic|Han|Hiragana|Katakana|Hangul|Arabic|Hebrew|Thai|Devanagari"
)
"""Categories and scripts without control characters, quotes and backslashes."""


def _category_has(category: re.Match[str], character: str) -> bool:
    name = category["long"] or category["short"]
    name = name.removeprefix("Script=").removeprefix("script=").removeprefix("sc=")
    if _WITHOUT_SPECIALS.fullmatch(name):
        has = False
    elif name in ("P", "Po", "Punctuation"):
        has = character in '"\\'
    elif name in ("C", "Cc", "Other", "Control"):
        has = character not in '"\\'
    else:
        raise NotExpressible(f"{category.group()} in a regular expression")
    return has != category.group().startswith("\\P")
