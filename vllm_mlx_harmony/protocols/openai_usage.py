"""The details of generated tokens that both of OpenAI's APIs report."""

from __future__ import annotations

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.protocols.events import Document


def output_details(usage: Usage) -> Document:
    """The object in the field ``completion_tokens_details`` or ``output_tokens_details``.

    ``tool_output_tokens`` is an extension, and predictions are OpenAI's for Chat alone. They are
    absent from an answer that has none.
    """
    optional = {
        "tool_output_tokens": usage.tool_tokens,
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }
    return {
        "reasoning_tokens": usage.reasoning_tokens,
        **{name: tokens for name, tokens in optional.items() if tokens},
    }
