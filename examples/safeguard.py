"""Classifies content by a policy of your own with gpt-oss-safeguard.

gpt-oss-safeguard-20b and -120b have the format of gpt-oss and are served in the same way: on a Mac
from a directory with their weights for MLX, or by a gateway in front of vLLM. The policy is the
instructions, the content is the user's message and nothing else. How long the model thinks about
the policy is `reasoning_effort`. How to write one:
https://cookbook.openai.com/articles/gpt-oss-safeguard-guide

    vllm-mlx serve DIRECTORY --served-model-name gpt-oss-safeguard --tool-call-parser harmony
    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none
    python safeguard.py "Buy followers now!"
"""

import json
import sys
from typing import Any

from openai import OpenAI

POLICY = """\
# Spam policy

Classify the content. Spam is unsolicited, repetitive or deceptive promotion.

## Rules
- SP1: asks for clicks, money or followers without any relation to the conversation (violates).
- SP2: promotes the author's own work where that is the topic (allowed).

Answer with the violation (true or false), the rules that apply and a rationale of one sentence."""

VERDICT = {
    "type": "object",
    "properties": {
        "violation": {"type": "boolean"},
        "rules": {"type": "array", "items": {"type": "string", "enum": ["SP1", "SP2"]}},
        "rationale": {"type": "string"},
    },
    "required": ["violation", "rules", "rationale"],
    "additionalProperties": False,
}


def classified(content: str, model: str = "gpt-oss-safeguard") -> tuple[dict[str, Any], str]:
    """The verdict on ``content``, and the reasoning that led to it."""
    answer = OpenAI().chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": content}],
        reasoning_effort="medium",
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT},
        },
    )
    message = answer.choices[0].message
    reasoning = (message.model_extra or {}).get("reasoning_content", "")
    return json.loads(message.content or ""), reasoning


if __name__ == "__main__":
    verdict, reasoning = classified(*sys.argv[1:])
    print("reasoning:", reasoning)
    print("verdict:  ", json.dumps(verdict))
