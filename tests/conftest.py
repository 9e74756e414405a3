"""For every test: generated examples have no time limit, because these are not timed tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from sizes import examples

settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")
