"""For every test: generated examples have no time limit, because these are not timed tests, and
clients share the certificates they would trust: httpx reads 140 of them for each, in 15 ms of a
processor, and everything here is plain HTTP.
"""

from __future__ import annotations

import functools
import ssl

from hypothesis import HealthCheck, settings
from sizes import examples

settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")

ssl.create_default_context = functools.cache(ssl.create_default_context)
