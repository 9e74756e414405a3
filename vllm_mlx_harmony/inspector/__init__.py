"""The inspector: pages at ``/harmony`` that show what the model reads and writes.

It is off by default, because it shows prompts and answers. Nothing below imports this package. A
server that has it calls ``install``, and from then on each answer of the application has an
observer (`server.observer`), whose records are in memory only (`record`). Pages are static files
(`static`), which get their data as JSON (`routes`) from clients that have the server's key
(`access`).
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware

from vllm_mlx_harmony.inspector.failures import Failures
from vllm_mlx_harmony.inspector.record import Log
from vllm_mlx_harmony.inspector.routes import PAGE, Pages, Status
from vllm_mlx_harmony.server.front_end import installed_in

__all__ = ["PAGE", "install"]


def install(app: Starlette, status: Status) -> Callable[[], None]:
    """Adds the inspector to ``app``, which has a host. Returns a function that undoes that.

    ``status`` is what the server knows of its memory, queue and engines.
    """
    log = Log()
    routes = Pages(log, status).routes
    failures = Middleware(Failures, log=log)
    factories = installed_in(app).observer_factories
    factories.append(log.observe)
    app.router.routes.extend(routes)
    app.user_middleware.insert(0, failures)
    app.middleware_stack = None  # the next request builds it again

    def undo() -> None:
        app.middleware_stack = None
        app.user_middleware.remove(failures)
        for route in routes:
            app.router.routes.remove(route)
        factories.remove(log.observe)

    return undo
