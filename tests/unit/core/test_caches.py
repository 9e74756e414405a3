"""Caches of the core: those of the whole process hold nothing that a client wrote."""

from __future__ import annotations

import importlib
import pkgutil

import vllm_mlx_harmony.core

UNBOUND = {
    "vllm_mlx_harmony.core.grammar.any_order._character",  # of one character
    "vllm_mlx_harmony.core.reasoning._analysis_ids",  # no arguments
    "vllm_mlx_harmony.core.vocab._control_names",  # no arguments
    "vllm_mlx_harmony.core.vocab._table",  # no arguments
    "vllm_mlx_harmony.core.render._system_form",  # flags, an effort, names of built-in tools
}


def test_process_wide_caches_take_no_client_text() -> None:
    """A cache of what clients write is a ``ByteLRU`` whose keys contain the tenant."""
    core = vllm_mlx_harmony.core
    names = [module.name for module in pkgutil.walk_packages(core.__path__, core.__name__ + ".")]
    found = {
        f"{value.__module__}.{value.__name__}"
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if hasattr(value, "cache_parameters")
    }
    assert found == UNBOUND
