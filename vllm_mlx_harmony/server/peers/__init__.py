"""Several servers behind one address: what they share through a Redis. Disabled by default.

Servers that have the same clients name the same Redis in ``VLLM_MLX_HARMONY_STORE``. A client can
then send each request of a conversation to a different one:

- `connection`: the connection, and the key of encrypted reasoning.
- `store`: the responses of all servers.
- `directory`: an answer can be cancelled, and a background response followed, on any server,
  wherever it is generated.
- `turns`: prompts reuse the turns that other servers have generated.

The front end uses all of it as a `server.storage.sharing.Sharing`, which is made in `sharing`. The
limits of a gateway use the connection.
"""
