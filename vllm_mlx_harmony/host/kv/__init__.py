"""vllm-mlx's two engines on the prefix cache (`engine.prefix_cache`), steered from outside.

`prefix` has what they share; `simple` and `batched` are the engines; `status` shows it, `opening`
opens the disk. docs/reuse.md is the page about it.
"""
