"""Syntaxes of freeform tools and of answers: texts that are accepted and rejected."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from harmony_text import ids_of

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.core.errors import RequestError
from vllm_mlx_harmony.core.grammar import Grammar, Matcher, Policy, compile_grammar, grammar_of
from vllm_mlx_harmony.core.names import Names
from vllm_mlx_harmony.core.turn import ResponseFormat, Syntax, Tool, Turn, User

APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar of Codex's tool: https://github.com/openai/codex (apply-patch), Apache-2.0."""

PATCH = (
    '*** Begin Patch\n*** Add File: a/b "x".py\n+print("héllo\\n")\n+\tx\n+\n'
    "*** Update File: q\n*** Move to: r\n@@ def f():\n-a\n+b/c\n*** End of File\n*** End Patch\n"
)

ARITHMETIC = """\
start: sum
sum: sum "+" term | term   // left recursive
term: "(" sum ")" | NUMBER
%import common.NUMBER
%ignore " "
"""

ESCAPES = r"""
start: KEY "=" value ("," value)*
KEY.2: /[a-z]+/i
!value: "\"" /[^"\n]*/ "\"" -> quoted | "tab"i | "0".."9" | /\/[^\/]+\//
"""


@dataclass(frozen=True)
class Row:
    id: str
    kind: str
    definition: str
    accepted: tuple[str, ...]
    refused: tuple[str, ...]


ROWS = [
    Row("apply_patch", "lark", APPLY_PATCH,
        (PATCH, "*** Begin Patch\n*** Delete File: é\n*** End Patch"),
        ("", "*** Begin Patch\n*** End Patch", PATCH.replace("@@ ", "@"), PATCH + "x",
         PATCH.replace("\n+\n", "\n\n"))),
    Row("recursive", "lark", ARITHMETIC,
        ("1", "(1 + 2)+((3))", "1.5e3"), ("", "1+", "(1", "1)", "one")),
    Row("literals of all kinds", "lark", ESCAPES,
        ('Ab="x\\y é",TAB', "a=7", "a=/x\t/", 'a=""'), ("a", "a=", 'a="\n"', "a=//", "1=7")),
    Row("imports", "lark",
        "start: SIGNED_NUMBER WS WORD\n%import common (SIGNED_NUMBER, WS, WORD)\n",
        ("-1.5 \t\n ab", "3 x"), ("x", "3x", "3 4")),
    Row("renamed import", "lark", "start: A A\n%import common.DIGIT -> A\n", ("12",), ("1", "123")),
    Row("flags", "lark", "start: /a.b/s /c/i /(?i:d)e(?i)f/\n",
        ("a\nbcdef", "a\"bCDeF"), ("a\nbcdEf", "abcdef")),
    Row("classes", "lark", r'start: /[^a-z\\]/ /\S/ /[\p{L}"]+/ /\x31[\]]/',
        ('"\\"é"1]', "\n.x1]"), ("\\.x1]", "a.x1]", "1.11]")),
    Row("anchors at the ends", "lark", r"start: /^a\d$/ /b\$/", ("a1b$",), ("a", "a1b", "a1b$x")),
    Row("characters by their numbers", "lark", r"start: /\u0041\x{22}\u{43}[\x{22}-$]\t/ /[^\[]/",
        ('A"C#\t"', 'A"C$\t\\'), ("ABC#\t.", 'A"C%\t.', 'A"C#\t[')),
    Row("categories", "lark", r"start: /\p{P}\P{Po}\pL[^\p{Script=Greek}]\p{Cc}[\P{Control}a]/",
        ('"aéb\n"', "\\\téb\x01x"), ("a", '""éb\na', '"aéγ\na', '"aéb\n\n')),
    Row("counts", "lark", 'start: "a"{2,3} "b"~2 [ "c" ]', ("aabb", "aaabbc"), ("abb", "aab")),
    Row("a regular expression", "regex", r"[0-9]{4}-[0-9]{2}", ("2026-11",), ("2026", "x2026-11")),
    Row("one with a line feed", "regex", "a\nb/[\nc]", ("a\nb/\n", "a\nb/c"), ("ab/c",)),
    Row("an empty one", "regex", "", ("",), ("a",)),
    Row("one with alternatives", "regex", r"ab|cd", ("ab", "cd"), ("abcd", "a", "abc")),
    Row("one with quotes", "regex", r'"[^"\n]*"\n', ('"a\\tb\t/"\n', '""\n'), ('"a"', '"\n"\n')),
]  # fmt: skip


def turn_with_syntax(kind: str, definition: str, place: str, *, strict: bool = False) -> Turn:
    """A turn that requires a text of this syntax, from a freeform tool or as the answer."""
    syntax = Syntax(kind, definition)  # type: ignore[arg-type]
    if place == "answer":
        return Turn((User("Hi."),), response_format=ResponseFormat(syntax=syntax, strict=strict))
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}}
    tool = Tool("patch", parameters=parameters, syntax=syntax, strict=strict)
    return Turn((User("Hi."),), tools=(tool,))


def encode_output(text: str, place: str) -> list[int]:
    if place == "answer":
        return [*ids_of("<|channel|>final<|message|>"), *vocab.encode(text), vocab.RETURN]
    separators = (", ", ": ") if place == "tool, with spaces" else (",", ":")
    arguments = json.dumps({"input": text}, ensure_ascii=False, separators=separators)
    header = "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>"
    return [*ids_of(header), *vocab.encode(arguments), vocab.CALL]


def compile_turn(turn: Turn) -> tuple[Grammar, Matcher]:
    grammar = grammar_of(turn, Names.of(turn))
    assert grammar is not None
    return grammar, compile_grammar(grammar).matcher()


@pytest.mark.parametrize("place", ["tool", "tool, with spaces", "answer"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_matching_text_is_accepted(row: Row, place: str) -> None:
    for text in row.accepted + row.refused:
        grammar, matcher = compile_turn(turn_with_syntax(row.kind, row.definition, place))
        assert grammar.notes == ()
        accepted = all(map(matcher.consume, encode_output(text, place)))
        assert accepted == (text in row.accepted), text


WITHIN_JSON = {
    "complement": ("lark", 'start: A\nA: ~"a"', "~"),
    "an escape": ("lark", r'start: "\q"', r'"\q"'),
    "flags of a line": ("lark", "start: /a/m", "'m'"),
    "flags of a group": ("lark", "start: /(?x:a)/", "(?x:"),
    "an anchor": ("lark", "start: /a^b/", "^"),
    "an unterminated class": ("lark", r"start: /[a\]b/", "unterminated character class"),
    "looking ahead": ("lark", "start: /a(?!b)c/", "look-around"),
    "a lone parenthesis": ("lark", "start: /a)b/", "unmatched parenthesis"),
    "an edge of words": ("lark", r"start: /a\b/", r"\b"),
    "a class of classes": ("lark", "start: /[a[bc]]/", "[a[bc]"),
    "a class the wrong way round": ("lark", "start: /[z-a]/", "[z-a]"),
    "a category": ("lark", r"start: /\p{Emoji}/", r"\p{Emoji}"),
}
"""Syntax that has no form within JSON, though llguidance may accept it for plain text."""

BAD = {
    **WITHIN_JSON,
    "an id": ("lark", "start: <|end|>", "<|end|>"),
    "ids": ("lark", 'start: "a" <[200012]>', "<[200012]>"),
    "another grammar": ("lark", "start: @other", "@other"),
    "out of its braces": ("lark", 'start: "a"\n}\nfoo: "b" {', "brace"),
    "open braces": ("lark", 'start: "a"{2', "brace"),
    "JSON": ("lark", 'start: %json {"type": "object"}', "%json"),
    "nested": ("lark", 'start: %lark { start: "a" }', "%lark"),
    "options": ("lark", '%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
    "no start": ("lark", 'foo: "a"', ""),
    "no end of a string": ("lark", 'start: "a', "without its end"),
    "no end of many strings": ("lark", "start: " + '"\\' * 100_000, "without its end"),
    "no end of many expressions": ("lark", "start: " + "/\\" * 100_000, "without its end"),
    "an import of nothing": ("lark", f"%import common{' ' * 100_000}!", "%import"),
    "marks without a name": ("lark", f"start: {'!' * 100_000}", ""),
    "an unknown import": ("lark", "start: X\n%import common.X", "common.X"),
    "look-around": ("regex", "(?=a)b", "look-around"),
    "a back reference": ("regex", r"(a)\1", r"\1"),
}


PLACES = [(case, "tool") for case in BAD] + [(case, "answer") for case in {*BAD} - {*WITHIN_JSON}]


@pytest.mark.nightly(sample=3)
@pytest.mark.parametrize(("case", "place"), sorted(PLACES))
def test_unenforceable_syntax_is_rejected_when_strict(case: str, place: str) -> None:
    kind, definition, words = BAD[case]
    grammar, matcher = compile_turn(turn_with_syntax(kind, definition, place))
    subject = "the response format" if place == "answer" else "the format of tool 'patch'"
    assert grammar.notes[0].startswith(subject)
    assert place == "answer" or words in grammar.notes[0]
    assert all(map(matcher.consume, encode_output("anything\n", place)))
    for policy, strict in ((Policy.AUTO, True), (Policy.STRICT, False)):
        turn = turn_with_syntax(kind, definition, place, strict=strict)
        with pytest.raises(RequestError, match=subject) as raised:
            grammar_of(turn, Names.of(turn), policy)
        assert raised.value.param == ("response_format" if place == "answer" else "tools")
