"""A tool server over MCP for the demo: ``python -m vllm_mlx_harmony.standin.calculator``."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer


def server() -> MCPServer:
    calculator = MCPServer("calculator", log_level="WARNING")

    @calculator.tool()  # type: ignore[untyped-decorator]
    def multiply(a: int, b: int) -> str:
        """Multiplies two whole numbers."""
        return str(a * b)

    return calculator


if __name__ == "__main__":
    server().run()
