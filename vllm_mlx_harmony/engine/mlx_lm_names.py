"""The names of mlx-lm that are used, each with its parameters and what it is for.

They are checked before a model is loaded: a version of mlx-lm that changes one must not be noticed
in the middle of a request.
"""

from __future__ import annotations

from vllm_mlx_harmony.required_names import Name

NAMES: tuple[Name, ...] = (
    Name("mlx_lm.utils:load_model", "loads a model", "model_path lazy ..."),
    Name(
        "mlx_lm.utils:load_tokenizer",
        "loads the tokenizer for callers in vllm-mlx",
        "model_path tokenizer_config_extra ...",
    ),
    *(
        Name(f"mlx_lm.models.cache:{name}", why, parameters)
        for name, why, parameters in (
            ("make_prompt_cache", "makes the KV caches of a request", "model ..."),
            ("RotatingKVCache._temporal_order", "orders the tokens of a window", "self v"),
            ("KVCache.merge", "makes a batch", "caches"),
            ("RotatingKVCache.merge", "makes a batch", "caches"),
            ("BatchKVCache.prepare", "pads prompts of a batch", "self lengths right_padding ..."),
            ("BatchKVCache.finalize", "pads prompts of a batch", "self"),
            ("BatchKVCache.extend", "adds rows to a batch", "self other"),
            ("BatchKVCache.filter", "removes rows from a batch", "self batch_indices"),
            ("BatchKVCache.extract", "reads a row of a batch", "self idx"),
            (
                "BatchRotatingKVCache.prepare",
                "pads prompts of a batch",
                "self lengths right_padding ...",
            ),
            ("BatchRotatingKVCache.finalize", "pads prompts of a batch", "self"),
            ("BatchRotatingKVCache.extend", "adds rows to a batch", "self other"),
            ("BatchRotatingKVCache.filter", "removes rows from a batch", "self batch_indices"),
            ("BatchRotatingKVCache.extract", "reads a row of a batch", "self idx"),
        )
    ),
    *(
        Name(f"mlx_lm.models.cache:{owner}.{name}", why)
        for owner, why, names in (
            ("KVCache", "state of a layer with full attention", "keys values offset nbytes"),
            (
                "RotatingKVCache",
                "state of a window",
                "keys values offset nbytes keep max_size _idx",
            ),
            ("BatchKVCache", "state of a batch", "keys values nbytes left_padding _idx"),
            ("BatchRotatingKVCache", "state of a batch", "keys values nbytes"),
        )
        for name in names.split()
    ),
)
