"""The front end without vllm-mlx: a server over engines that are reached by HTTP.

`settings` is the configuration, `app` the server as a ``Host``, `engines` has the engines as
``Engine``s, and `fleet` chooses one for each request. Nothing here imports ``host``, vllm-mlx or
mlx: the gateway runs where they cannot be installed.
"""
