"""The scripts in vLLM: a logits processor that adds weight to the next scripted token.

vLLM batches the ids of many sequences and pages their caches, so a model there sees ids without
their history. A logits processor is given the history of each sequence, behind the real scheduler
and prefix cache and before the real sampler. So grammars, biases and stop strings do what they do
with gpt-oss. The network is a real gpt-oss, too small and random to be heard
(``--load-format dummy``).

vLLM imports this file from the stand-in's directory, which must be in ``PYTHONPATH``:

    vllm serve DIR --load-format dummy --logits-processors standin_vllm:Scripted

Model Runner V2 has another interface, whose processors read the history on the device. vLLM for
processors cannot run it, so this is that of V1 (``VLLM_USE_V2_MODEL_RUNNER=0``); port it when V1
goes. https://docs.vllm.ai/en/v0.32.0/features/custom_logitsprocs/
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

WEIGHT = 90.0
"""Logit of the scripted token, as in `model`."""

Process = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


class Scripted(AdapterLogitsProcessor):
    """Follows the scripts in the directory of this file."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._budget = vllm_config.scheduler_config.max_num_batched_tokens
        self._cursor, self._here = importlib.import_module("standin_cursor"), Path(__file__).parent
        table = self._cursor.read_table((self._here / self._cursor.TABLE).read_bytes())
        self._decode = self._cursor.decoder(table)
        instead = self._cursor.instead(table)
        logits = [instead.get(token, 0.0) for token in range(len(table))]
        self._instead = torch.tensor(logits, device=device)

    def is_argmax_invariant(self) -> bool:
        """No: vLLM would leave it out of greedy sampling."""
        return False

    def new_req_logits_processor(self, params: Any) -> Process:
        """What is called in each step of a sequence, those in which only a part of its prompt is
        computed included. It is only told the whole prompt: how much is computed follows from how
        often it was called."""
        steps = count()

        def process(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            book = self._cursor.read_book(self._here)
            if not output:
                left = len(prompt) - next(steps) * self._budget
                slow = self._cursor.prompt_ms(prompt, book, self._decode)
                time.sleep(max(0, min(left, self._budget)) * slow / 1000)
            step = self._cursor.next_step([*prompt, *output], book, self._decode)
            if step.fails:  # which ends vLLM's engine
                raise RuntimeError("the stand-in's script says: fail here")
            time.sleep(step.delay_ms / 1000)
            logits = logits + self._instead  # what a grammar forbids is -inf, and remains it
            logits[step.token] += WEIGHT - self._instead[step.token]
            return logits

        return process
