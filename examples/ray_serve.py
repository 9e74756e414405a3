"""Engines that Ray Serve places, starts and restarts, each under a path of its own.

    pip install 'ray[serve,llm]'
    python examples/ray_serve.py 32                     # on the head of a Ray cluster of 64 GPUs
    vllm-mlx-harmony gateway --model openai/gpt-oss-120b \
        $(for n in $(seq 0 31); do echo --engine vllm=http://ray-head:8000/engine-$n; done)

One application for each engine, and not one with 32 replicas: Ray's own routers choose a replica
by the text of a prompt, or by nothing (`PrefixCacheAffinityRouter` takes a prompt of ids as empty).
Under a path of its own each engine can be chosen by the gateway, which knows conversations.
"""

from __future__ import annotations

import sys

from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

MODEL = "openai/gpt-oss-120b"


def main() -> None:
    """Starts as many engines as the first argument says, and serves until it is interrupted."""
    serve.start(http_options={"host": "0.0.0.0", "port": 8000})
    for number in range(int(sys.argv[1])):
        engine = LLMConfig(
            model_loading_config={"model_id": MODEL, "model_source": MODEL},
            accelerator_type="H100",
            engine_kwargs={
                "tensor_parallel_size": 2,
                "structured_outputs_config": {"backend": "guidance", "enable_in_reasoning": True},
                "enable_prompt_tokens_details": True,
            },
            deployment_config={"num_replicas": 1, "max_ongoing_requests": 512},
        )
        app = build_openai_app({"llm_configs": [engine]})
        last = number + 1 == int(sys.argv[1])
        name = f"engine-{number}"
        serve.run(app, name=name, route_prefix=f"/{name}", blocking=last)


if __name__ == "__main__":
    main()
