"""A request that is given up while it waits is not generated for nobody."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_mlx")

from vllm_mlx.request import Request, SamplingParams

from vllm_mlx_harmony.host.engine import forget_waiting


@pytest.mark.parametrize("gone", ["first", "second", "nobody"])
def test_only_the_one_that_is_given_up_leaves_the_queue(gone: str) -> None:
    waiting = deque(Request(name, [1], SamplingParams()) for name in ("first", "second"))
    scheduler = SimpleNamespace(waiting=waiting)
    told: list[str] = []
    abort = forget_waiting(lambda _, request_id: bool(told.append(request_id)) or True)
    assert abort(scheduler, gone)
    left = [request.request_id for request in waiting]
    assert left == [name for name in ("first", "second") if name != gone]
    assert told == [gone]
