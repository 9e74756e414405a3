"""What a turn may say, as one grammar over the ids of the whole output.

**The language.** Generation begins behind ``<|start|>assistant``. What follows is any number of
messages that leave the turn open, and one that ends it::

    turn     = { open "<|start|>assistant" } last
    open     = "<|channel|>analysis<|message|>"   TEXT "<|end|>"      reasoning
             | "<|channel|>commentary<|message|>" TEXT "<|end|>"      a preamble
    last     = "<|channel|>final" [ type ] "<|message|>" BODY "<|return|>"
             | call [ WORD | type ] "<|message|>" ARGUMENTS "<|call|>"
    call     = " to=" NAME [ "<|channel|>" CHANNEL ]                  recipient in role position
             | "<|channel|>" CHANNEL " to=" NAME                      in channel position
    type     = [ " " ] "<|constrain|>" ("json" | "code")
    WORD     = " json" | " code"

``TEXT`` is any text; ``BODY`` that, or the JSON that is asked for; ``ARGUMENTS`` the JSON of the
tool that is ``NAME``. What the caller wants of the turn (its tools and their choice, its format,
whether it may think) decides which of these alternatives there are; nothing is asked of the model
that is not in the language, and nothing else can be said. The turn has one call at most: generation
stops at ``<|call|>``, so ``parallel_tool_calls: false`` asks for nothing more.

**Why lenient.** gpt-oss writes one and the same call in a dozen ways: the recipient behind the role
or behind the channel, on any channel, with or without a content type, which is a word or follows
``<|constrain|>``. A model that is kept from its habit is pushed off the path it was trained on, and
pays for it in the arguments. So every header that the parser (semantics B) reads as intended is in
the language. Noise that the parser merely survives is not: there the mask helps. Nor is
``final json``, in which openai-harmony's own parser reads a recipient.

**Why in token space.** A control token is an id that no text has. A grammar over text cannot tell
``<|end|>`` from the seven characters that a user may well talk about, and either lets a body end in
the middle or forbids talking about Harmony. Here control tokens are ids and texts are bytes, and
neither can become the other. The parser, the renderer and the grammar thus agree on where a message
ends, whatever it says.

**What is enforced of a schema** depends on what was asked for.

*Without strictness* the caller asked for nothing, and a default must not change what a model
validly says. So arguments and answers are only kept from being invalid: every text with unique
names that a JSON parser and JSON Schema accept is in the language, with properties in any order at
every level, any white space, any escape, ``1.0`` and ``1e3`` where they are integers. What is not
in it: names that are not declared where they are closed, values of a wrong type or out of bounds,
an end before what is required has come, a name twice. The schema becomes rules of our own
(`unordered`), since ``%json`` of llguidance has one order and one spelling. Five things are bounded
where JSON is not: 256 characters of white space in one place; 64 undeclared names in a row, in an
object with required names; 64 names of an object of which is remembered that they have come;
exponents that move the point across more than some twenty digits, beside a bound; and the text of
all schemas together. Beyond the last bound and that of remembered names, more is accepted than is
valid; beyond the others, valid text is rejected. They are far from what models write in earnest,
and keep one that loops from going on until its output is cut.

*With strictness* a schema is enforced in the order of its properties, as OpenAI promises, by
``%json`` (`expressible`), and wholly: a keyword that llguidance cannot express is an error that
names it.

A schema that is not strict is never a reason to refuse a request. A keyword that has no rule is
left out, and a note says so. A grammar that is too large, or that llguidance refuses, is weakened
tool by tool: a tool has its schema, or any JSON object, or any text.

What the input of a freeform tool must match is enforced within the JSON string that carries it
(`escaped`): the prompt shows the model one string parameter, its earlier calls stand in the history
that way, and so it goes on.

**When there is none.** ``grammar_of`` is ``None`` under the policy ``off`` and only then. Without
tools the language is small, but it is not everything: a call to a tool that was never declared can
be written nowhere in it, and the turn always ends in an answer. That is the cheapest grammar there
is, most of it one free text: 5 µs of a processor for an id, 0.05 % of a step of 10 ms
(``ci/bench_grammar.py``). A state machine of our own would have to read every id as well.

**Ids that are forced** are drawn one by one all the same. As headers come in many forms and white
space is free, there are few of them: 9 of the 88 ids of a short thought and a call, in runs of one
to three, 7 % of a typed answer, each by itself, 5 of 6,778 in a text. To compute several in one
pass saves a step for each, at most, and its products are rounded otherwise: with the tiny random
model in float32, 4 of 24 contexts gave other logits (by up to 2e-6) behind 16 forced ids. No id of
192 differed for it, but none would be promised to be the same, for no clear gain.

The grammar is a value; compiling it (`compiled`) and following one output (`Matcher`) is
llguidance's part: https://github.com/guidance-ai/llguidance, its variant of Lark in
``docs/syntax.md``, what it takes of JSON Schema in ``docs/json_schema.md``. Harmony:
https://cookbook.openai.com/articles/openai-harmony. How long reasoning may go on is not in the
grammar, because it is no property of a text: that is ``core.reasoning``.
"""

from __future__ import annotations

from vllm_mlx_harmony.core.grammar.expressible import Check, compile_error, with_compact_json
from vllm_mlx_harmony.core.grammar.language import Grammar, Policy, grammar_of
from vllm_mlx_harmony.core.grammar.matching import (
    WORDS,
    Compiled,
    Mask,
    Matcher,
    NotCompiled,
    compiled,
    prepare,
    remembered,
)

__all__ = [
    "WORDS",
    "Check",
    "Compiled",
    "Grammar",
    "Mask",
    "Matcher",
    "NotCompiled",
    "Policy",
    "compile_error",
    "compiled",
    "grammar_of",
    "prepare",
    "remembered",
    "with_compact_json",
]
