"""Installs a ``FrontEnd`` in an application, with what its settings name to be shared."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette

from vllm_mlx_harmony.server.front_end import FrontEnd
from vllm_mlx_harmony.server.host import Host
from vllm_mlx_harmony.server.observer import ObserverFactory
from vllm_mlx_harmony.server.peers.connection import Connection, connect
from vllm_mlx_harmony.server.peers.sharing import RedisSharing
from vllm_mlx_harmony.server.settings import ServerSettings
from vllm_mlx_harmony.server.storage.sharing import Sharing
from vllm_mlx_harmony.server.storage.single_server import SingleServer
from vllm_mlx_harmony.server.storage.store import open_store


def open_sharing(settings: ServerSettings, connection: Connection | None) -> Sharing:
    """What a server with these settings shares over ``connection``, its Redis, if it has one.

    Raises ``StoreError`` if the store cannot be used.
    """
    if connection is not None:
        return RedisSharing(connection)
    return SingleServer(open_store(settings.store))


def install(
    app: Starlette,
    host: Host,
    observer_factories: Iterable[ObserverFactory] = (),
    sharing: Sharing | None = None,
) -> None:
    """Makes a front end available to all requests to ``app``.

    Opens what the host's settings name to be shared, unless that is passed. Raises ``HostError``.
    """
    if sharing is None:
        sharing = open_sharing(host.server_settings, connect(host.server_settings))
    app.state.vllm_mlx_harmony = FrontEnd(host, sharing, observer_factories)


def uninstall(app: Starlette) -> None:
    del app.state.vllm_mlx_harmony
