"""``FrontEnd``: what all requests to an application share.

A server installs one in its application, where requests find it. Nothing of it belongs to the
process, so that applications in one process have nothing in common.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from vllm_mlx_harmony.server.answers import Answers
from vllm_mlx_harmony.server.host import Host
from vllm_mlx_harmony.server.model_names import ModelNames
from vllm_mlx_harmony.server.observer import Observe
from vllm_mlx_harmony.server.settings import Enforcement, ServerSettings


class FrontEnd:
    """The front end of an application.

    ``observe`` has the functions that make the observers of each answer; others may be added.
    """

    def __init__(
        self, host: Host, settings: ServerSettings, observe: Iterable[Observe] = ()
    ) -> None:
        self.host = host
        self.settings = settings
        self.enforcement = Enforcement.of(self.settings)
        self.observe = [*observe]
        self.answers = Answers()

    @property
    def names(self) -> ModelNames:
        return ModelNames(self.host.model_name, self.settings.model_names)


def install(app: Starlette, host: Host, observe: Iterable[Observe] = ()) -> None:
    """Makes a front end available to all requests to ``app``, with the settings in the
    environment."""
    app.state.vllm_mlx_harmony = FrontEnd(host, ServerSettings.read(), observe)


def uninstall(app: Starlette) -> None:
    del app.state.vllm_mlx_harmony


def installed_in(app: Starlette) -> FrontEnd:
    front_end: FrontEnd = app.state.vllm_mlx_harmony
    return front_end


def front_end_of(connection: HTTPConnection) -> FrontEnd:
    return installed_in(connection.app)


def host_of(connection: HTTPConnection) -> Host:
    return front_end_of(connection).host
