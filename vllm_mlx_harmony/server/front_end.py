"""``FrontEnd``: what all requests to an application share.

A server installs one in its application (`installation`), where requests find it. Nothing of it
belongs to the process, so that applications in one process have nothing in common.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from vllm_mlx_harmony.core.replay import Replay
from vllm_mlx_harmony.server.encryption import ServerCipher, key_of_secret, own_key
from vllm_mlx_harmony.server.host import Host
from vllm_mlx_harmony.server.model_names import ModelNames
from vllm_mlx_harmony.server.observer import ObserverFactory
from vllm_mlx_harmony.server.settings import Enforcement
from vllm_mlx_harmony.server.storage.responses import Responses
from vllm_mlx_harmony.server.storage.sharing import Sharing


class FrontEnd:
    """The front end of an application.

    ``observer_factories`` make the observers of each answer; others may be added.
    """

    def __init__(
        self,
        host: Host,
        sharing: Sharing,
        observer_factories: Iterable[ObserverFactory] = (),
    ) -> None:
        self.host = host
        self.settings = host.server_settings
        self.sharing = sharing
        self.enforcement = Enforcement.of(self.settings)
        self.observer_factories = [*observer_factories]
        self.answers = sharing.answers
        self.responses = Responses(sharing, self.settings)
        self._key: bytes | None = None
        self._reading_key = threading.Lock()

    @cached_property
    def turns(self) -> Replay | None:
        """The generated turns that prompts may reuse; ``None`` if reuse is disabled."""
        size = self.settings.replay * 2**20
        return Replay(size, self.sharing.archive or self.host.archive) if size else None

    def cipher(self, tenant: str) -> ServerCipher:
        """Encrypts reasoning for ``tenant``. May block, since the key is read when it is first
        needed: that in the settings, or of all servers, or in the user's state directory."""
        with self._reading_key:
            if self._key is None:
                self._key = (
                    key_of_secret(self.settings.seal_key)
                    if self.settings.seal_key
                    else self.sharing.encryption_key or own_key()
                )
        return ServerCipher(self._key, tenant)

    @property
    def names(self) -> ModelNames:
        return ModelNames(self.host.model_name, self.settings.model_names)


@dataclass(frozen=True, slots=True)
class Caller:
    """A ``tenant`` of a front end: all that an API needs to know of who sent a request."""

    front_end: FrontEnd
    tenant: str

    @property
    def responses(self) -> Responses:
        return self.front_end.responses

    @property
    def cipher(self) -> ServerCipher:
        return self.front_end.cipher(self.tenant)


def installed_in(app: Starlette) -> FrontEnd:
    front_end: FrontEnd = app.state.vllm_mlx_harmony
    return front_end


def front_end_of(connection: HTTPConnection) -> FrontEnd:
    return installed_in(connection.app)


def host_of(connection: HTTPConnection) -> Host:
    return front_end_of(connection).host
