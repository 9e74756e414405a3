"""The front end without vllm-mlx: a server of its own, over engines that are reached by HTTP.

Knows a process and its configuration (`settings`), the server as a ``Host`` (`app`), engines as
``Engine``s (`engines`), and which of several gets a request (`router`). Imports ``server`` and what
is below it; never ``host``, vllm-mlx or mlx, so that it runs where none of them can.
"""
