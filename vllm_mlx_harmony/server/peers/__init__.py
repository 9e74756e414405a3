"""Several servers behind one address: what they share through a Redis. Disabled by default.

Servers that have the same clients name the same Redis in ``VLLM_MLX_HARMONY_STORE``. A client can
then send each request of a conversation to a different one:

- `connection`: the connection, and the key of encrypted reasoning.
- `answers`: an answer can be cancelled on any server, wherever it is generated.
- `turns`: prompts reuse the turns that other servers have generated.

It is also used by the store of responses (`server.responses.store`), by `server.responses.lookup`,
which finds, follows, cancels and deletes them on any server, and by the limits of a gateway.
Without a Redis there is no connection and no heartbeat, and every server has a store of its own.
"""
