"""Tools that the server runs.

gpt-oss was trained to call tools within a turn and to continue with their results. `config` reads
the operator's file, `mcp_server` is the client of one MCP server, and `toolbox` runs the calls,
which `server.generation` asks for. `client_servers` has the servers that requests name by URL, and
`browser` the one of ``--web-search``. The package ``mcp`` is imported only if the operator enables
tools.
"""
