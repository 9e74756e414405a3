"""Several servers behind one address: what they share through a Redis. Disabled by default.

Servers that have the same clients name the same Redis in ``VLLM_MLX_HARMONY_STORE``. A client can
then send each request of a conversation to a different one:

- `stores`: stored responses, and the generated turns that prompts reuse.
- `connection`: the connection, and the key of encrypted reasoning.
- `answers`: an answer can be cancelled on any server, wherever it is generated.
- `responses`: background responses can be read, followed, cancelled and deleted on any server.

The gateway also counts its rate limit there. Without a Redis every function of this package returns
at once, and the server is on its own.
"""
