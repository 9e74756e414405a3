"""Tools that the server runs: what the operator configured, and how a call of one is run.

gpt-oss was trained to call tools within a turn and to go on with what they answer. Here are the
tools of such calls: `config` reads the operator's file, `mcp_server` speaks to one MCP server,
`toolbox` has all of them. The loop around them is `server.generation`. Nothing here runs, and the
package ``mcp`` is not imported, unless the operator switches it on.
"""
