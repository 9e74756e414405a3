"""Scripts are followed from ids alone, wherever in a completion the history ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from vllm_mlx_harmony.core import vocab
from vllm_mlx_harmony.standin import FALLBACK, Script, cursor
from vllm_mlx_harmony.standin.scripts import dump_book

Encode = Callable[[str], list[int]]

SYSTEM = "<|start|>system<|message|>You are a stand-in.<|end|>"
HI = "<|start|>user<|message|>Hi<|end|>"
OPEN = "<|start|>assistant"
PLAIN = "<|channel|>final<|message|>Hello there!<|return|>"
REASONED = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant" + PLAIN
CALL = (
    "<|channel|>analysis<|message|>The tool.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.get <|constrain|>json<|message|>{"é":1}<|call|>'
)
RESULT = '<|start|>functions.get to=assistant<|channel|>commentary<|message|>"ok"<|end|>'
LOST = str(FALLBACK.completion)


class Player:
    """Plays a book as an engine would: one id at a time, without state."""

    def __init__(self, encode: Encode, scripts: Sequence[Script]) -> None:
        self.encode = encode
        self.book = cursor.parse_book(dump_book(scripts, encode))
        self.decode = vocab.encoding().decode

    def step(self, history: Sequence[int]) -> cursor.Step:
        return cursor.next_step(history, self.book, self.decode)

    def play(self, prompt: str, answer: Sequence[int] = (), limit: int = 200) -> list[int]:
        """All ids of the answer up to the end of the turn; it begins with ``answer``."""
        history, generated = self.encode(prompt), list(answer)
        while len(generated) < limit and not (
            generated and generated[-1] in (vocab.RETURN, vocab.CALL)
        ):
            generated.append(self.step([*history, *generated]).token)
        return generated


ROWS = {
    "plain answer": ([Script("Hi", PLAIN)], SYSTEM + HI + OPEN, PLAIN),
    "an opening inside the completion": ([Script("Hi", REASONED)], SYSTEM + HI + OPEN, REASONED),
    "a call": ([Script("Hi", CALL)], SYSTEM + HI + OPEN, CALL),
    "first match counts": (
        [Script("Ha", CALL), Script("H", PLAIN), Script("Hi", REASONED)],
        SYSTEM + HI + OPEN,
        PLAIN,
    ),
    "the last message only": (
        [Script("Hi", CALL), Script('"ok"', PLAIN)],
        SYSTEM + HI + OPEN + CALL + RESULT + OPEN,
        PLAIN,
    ),
    "the whole prompt": (
        [Script("stand-in", PLAIN, whole_prompt=True)],
        SYSTEM + HI + OPEN,
        PLAIN,
    ),
    "a regular expression over the header": (
        [Script(re.compile(r"^<\|start\|>user.*hi", re.IGNORECASE | re.DOTALL), PLAIN)],
        SYSTEM + HI + OPEN,
        PLAIN,
    ),
    "a string is no regular expression": (
        [Script("H.", CALL), Script(".*", CALL)],
        SYSTEM + HI + OPEN,
        LOST,
    ),
    "no script": ([], SYSTEM + HI + OPEN, LOST),
    "without an end": ([Script("Hi", PLAIN[:-10])], SYSTEM + HI + OPEN, PLAIN),
    "an invented user inside the completion": (
        [Script("Hi", "<|channel|>final<|message|>A.<|end|>" + HI + OPEN + PLAIN)],
        SYSTEM + HI + OPEN,
        "<|channel|>final<|message|>A.<|end|>" + HI + OPEN + PLAIN,
    ),
    "the assistant spoke last": (
        [Script("Well.", PLAIN), Script("Hi", REASONED)],
        SYSTEM + HI + OPEN + "<|channel|>final<|message|>Well.<|end|>" + OPEN,
        PLAIN,
    ),
    "nothing to say": ([Script("Hi", "")], SYSTEM + HI + OPEN, "<|return|>"),
    "the same answer earlier": (
        [Script("Hi", REASONED)],
        SYSTEM + HI + OPEN + REASONED.replace("<|return|>", "<|end|>") + HI + OPEN,
        REASONED,
    ),
    "the call kept, the loop goes on": (
        [Script('"ok"', REASONED), Script("Hi", CALL)],
        SYSTEM + HI + OPEN + CALL + RESULT + OPEN,
        REASONED,
    ),
    "two calls, two results": (
        [Script(RESULT, PLAIN), Script("Hi", CALL)],
        SYSTEM + HI + OPEN + CALL + RESULT + RESULT + OPEN,
        PLAIN,
    ),
    "a raw prompt": ([Script("Once", REASONED)], "Once upon a time", REASONED),
    "a raw prompt with an opening": ([Script("Once", REASONED)], "Once" + OPEN, REASONED),
    "a raw prompt nobody knows": ([Script("Once", REASONED)], "Twice", LOST),
}


@pytest.mark.parametrize(("scripts", "prompt", "output"), ROWS.values(), ids=ROWS.keys())
def test_completion_is_followed(
    encode: Encode, scripts: list[Script], prompt: str, output: str
) -> None:
    assert Player(encode, scripts).play(prompt) == encode(output)


@pytest.mark.parametrize(("scripts", "prompt", "output"), ROWS.values(), ids=ROWS.keys())
def test_any_prefix_is_continued(
    encode: Encode, scripts: list[Script], prompt: str, output: str
) -> None:
    player, ids = Player(encode, scripts), encode(output)
    steps = [player.step([*encode(prompt), *ids[:cut]]).token for cut in range(len(ids))]
    assert steps == ids


def test_header_in_prompt_is_continued(encode: Encode) -> None:
    player = Player(encode, [Script("Hi", PLAIN)])
    header = "<|channel|>final<|message|>"
    assert player.play(SYSTEM + HI + OPEN + header) == encode(PLAIN)[len(encode(header)) :]


@pytest.mark.parametrize("output", [PLAIN, REASONED], ids=["plain", "reasoned"])
def test_forced_token_keeps_position(encode: Encode, output: str) -> None:
    player, ids = Player(encode, [Script("Hi", output)]), encode(output)
    for place in range(len(ids) - 1):
        if place and ids[place - 1] == vocab.START:
            continue  # begins a message of another role
        answer = [*ids[:place], 0]  # id 0 is "!", which neither completion has
        assert player.play(SYSTEM + HI + OPEN, answer)[place + 1 :] == ids[place + 1 :]


def test_return_repeats_after_completion(encode: Encode) -> None:
    player = Player(encode, [Script("Hi", CALL)])
    history = encode(SYSTEM + HI + OPEN + CALL)
    for _ in range(3):
        history.append(player.step(history).token)
    assert history[-3:] == [vocab.RETURN] * 3


def test_ids_are_played_unchanged(encode: Encode) -> None:
    halves = [vocab.CHANNEL, 17196, vocab.MESSAGE, 64, 201_087, 0, 199_999, vocab.RETURN]
    assert Player(encode, [Script("Hi", halves)]).play(SYSTEM + HI + OPEN) == halves


def test_delay_and_fault_are_at_their_ids(encode: Encode) -> None:
    player = Player(encode, [Script("Hi", PLAIN, delay_ms=7, fail_at=3)])
    prompt, ids = encode(SYSTEM + HI + OPEN), encode(PLAIN)
    steps = [player.step([*prompt, *ids[:cut]]) for cut in range(len(ids))]
    assert [step.delay_ms for step in steps] == [7] * len(ids)
    assert [step.fails for step in steps] == [cut == 3 for cut in range(len(ids))]


def test_earlier_turn_has_no_delay_or_fault(encode: Encode) -> None:
    player = Player(encode, [Script("Hi", PLAIN, delay_ms=7, fail_at=0), Script("Bye", PLAIN)])
    bye = HI.replace("Hi", "Bye")
    history = encode(SYSTEM + HI + OPEN + PLAIN.replace("<|return|>", "<|end|>") + bye + OPEN)
    step = player.step(history)
    assert (step.token, step.delay_ms, step.fails) == (encode(PLAIN)[0], 0, False)


def test_table_is_read_back() -> None:
    tokens = [b"a", b"", bytes(range(255)), "é".encode()]
    content = b"".join(bytes((len(token),)) + token for token in tokens)
    assert cursor.read_table(content) == tokens


def test_decoder_replaces_invalid_bytes() -> None:
    decode = cursor.decoder([b"a", b"\xf0\x9f", b"\x99\x82", b"<|end|>"])
    assert decode([0, 1, 2, 3]) == "a🙂<|end|>"
    assert decode([1, 0]) == "\ufffda"
