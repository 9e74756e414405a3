"""What a turn may contain, as one grammar over the token ids of the whole output.

**The language.** Generation begins after ``<|start|>assistant``. Any number of messages may
follow that leave the turn open, and then one that ends it::

    turn     = { open "<|start|>assistant" } last
    open     = "<|channel|>analysis<|message|>"   TEXT "<|end|>"      reasoning
             | "<|channel|>commentary<|message|>" TEXT "<|end|>"      a preamble
    last     = "<|channel|>final" [ type ] "<|message|>" BODY "<|return|>"
             | call [ WORD | type ] "<|message|>" ARGUMENTS "<|call|>"
    call     = " to=" NAME [ "<|channel|>" CHANNEL ]                  recipient in role position
             | "<|channel|>" CHANNEL " to=" NAME                      in channel position
    type     = [ " " ] "<|constrain|>" ("json" | "code")
    WORD     = " json" | " code"

``TEXT`` is any text. ``BODY`` is any text, or JSON of the requested format. ``ARGUMENTS`` is JSON
that fits the tool ``NAME``. The request (its tools, tool choice, format and reasoning effort)
decides which of these alternatives exist. A turn has at most one call, because generation stops at
``<|call|>``; so ``parallel_tool_calls: false`` needs no rule of its own.

**Lenient headers.** gpt-oss writes the same call in a dozen ways: with the recipient after the
role or after the channel, on any channel, with or without a content type, which is a plain word or
follows ``<|constrain|>``. Forcing one form pushes a model off the path it was trained on, and its
arguments get worse. So every header that the parser reads as intended (semantics B) is in the
language. Noise that the parser merely tolerates is not. Neither is ``final json``, in which
openai-harmony's own parser sees a recipient.

**Token ids, not text.** A grammar over text cannot tell the control token ``<|end|>`` from the
seven characters that a user may well write about. It would either let a body end too early or
forbid texts about Harmony. Here control tokens are ids and text is bytes, so the parser, the
renderer and the grammar always agree on where a message ends.

**How much of a schema is enforced** depends on ``strict``.

*Without strict*, the caller asked for no guarantee, so valid output must not change: only what
models really get wrong is not in the language (`any_order`). No number, pattern or grammar of a
client reaches llguidance, so these grammars are compiled without further ado. Such a schema never
fails a request. What of it cannot be read is left out, with a note; if the grammar is too large or
llguidance rejects it, there are weaker ones (`weakenings`).

*With strict*, a schema is enforced in the order of its properties, as OpenAI documents it, by
``%json`` (`strict`), and completely: a keyword that llguidance does not support is an error
that names it. A few bytes of a schema can bring llguidance down, when it is compiled or when output
reaches it, so such grammars are to be tried in another process first (`Grammar.trials`).

The syntax of a freeform tool's input is enforced inside the JSON string that carries it
(`escaped`): the prompt shows such a tool with one string parameter, and earlier calls in the
history have the same form.

**No grammar.** ``grammar_of`` returns ``None`` under the policy ``off`` only. Even without tools
there is a grammar: no undeclared tool can be called, and the turn always ends in an answer. Most of
it is one free text, which costs 5 µs of CPU time per id, 0.05 % of a step of 10 ms
(``benchmarks/bench_grammar.py``).

A `Grammar` is a value. llguidance compiles it (`compile_grammar`) and tracks outputs (`Matcher`):
https://github.com/guidance-ai/llguidance, with its Lark variant in ``docs/syntax.md`` and its JSON
Schema support in ``docs/json_schema.md``. Harmony:
https://cookbook.openai.com/articles/openai-harmony. Limits on the length of reasoning are not part
of the grammar, since they are not properties of a text: see ``core.reasoning``.
"""

from __future__ import annotations

from vllm_mlx_harmony.core.grammar.language import Grammar as Grammar
from vllm_mlx_harmony.core.grammar.language import Policy as Policy
from vllm_mlx_harmony.core.grammar.language import grammar_of as grammar_of
from vllm_mlx_harmony.core.grammar.language import is_strict as is_strict
from vllm_mlx_harmony.core.grammar.language import weakenings as weakenings
from vllm_mlx_harmony.core.grammar.matching import WORDS as WORDS
from vllm_mlx_harmony.core.grammar.matching import Compiled as Compiled
from vllm_mlx_harmony.core.grammar.matching import Mask as Mask
from vllm_mlx_harmony.core.grammar.matching import Matcher as Matcher
from vllm_mlx_harmony.core.grammar.matching import NotCompiled as NotCompiled
from vllm_mlx_harmony.core.grammar.matching import compile_grammar as compile_grammar
from vllm_mlx_harmony.core.grammar.matching import find_compiled as find_compiled
from vllm_mlx_harmony.core.grammar.matching import prepare as prepare
from vllm_mlx_harmony.core.grammar.strict import Check as Check
from vllm_mlx_harmony.core.grammar.strict import CheckUnavailable as CheckUnavailable
from vllm_mlx_harmony.core.grammar.strict import compile_error as compile_error
from vllm_mlx_harmony.core.grammar.strict import with_compact_json as with_compact_json
