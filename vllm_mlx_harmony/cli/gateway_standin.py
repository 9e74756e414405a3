"""gateway stand-in: an engine without a model, for trying out a gateway."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vllm_mlx_harmony.cli.errors import UsageError, port

EXAMPLES = """\
examples:
  vllm-mlx-harmony gateway stand-in --port 8001
  vllm-mlx-harmony gateway --engine http://127.0.0.1:8001 --model gpt-oss-20b
"""


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT. Raises ``UsageError`` for a speed that is not positive."""
    parser = argparse.ArgumentParser(
        prog="vllm-mlx-harmony gateway stand-in",
        description="Serves an engine without a model, for trying out a gateway: it answers every\n"
        "request with the same text, or with the shortest call or JSON if one is required.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, of = parser.add_argument, "(default: %(default)s)"
    add("--host", default="127.0.0.1", help=f"address to listen on {of}")
    add("--port", type=port, default=8001, help=f"port to listen on {of}")
    add("--model", default="gpt-oss-20b", metavar="NAME", help=f"name of the model {of}")
    add("--key", metavar="KEY", help="API key required from clients")
    pace = f"tokens generated per second {of}"
    add("--tokens-per-second", type=float, default=50.0, metavar="NUMBER", help=pace)
    parsed = parser.parse_args(arguments)
    if parsed.key is not None and not parsed.key.strip():
        raise UsageError("--key is empty; omit it to serve without a key")
    if not parsed.tokens_per_second > 0:
        raise UsageError("--tokens-per-second must be greater than 0")
    from vllm_mlx_harmony.gateway import standin
    from vllm_mlx_harmony.gateway.limits import digest
    from vllm_mlx_harmony.gateway.settings import GatewaySettings, Key

    settings = GatewaySettings(
        engines=(),
        model=parsed.model,
        host=parsed.host,
        port=parsed.port,
        keys=(Key("gateway", digest(parsed.key)),) if parsed.key else (),
    )
    return standin.serve(settings, 1 / parsed.tokens_per_second)
