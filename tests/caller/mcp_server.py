"""A real MCP server around the lab's create_job: mcp_server.py DATABASE FAULT [http]

FAULT is one of the lab's, or "cut": at COMMIT every connection breaks, or "held": at
COMMIT it waits until its stdin is closed. Over HTTP its port is on stdout.
"""

import faulthandler
import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent

import retry_lab
from tests.watch import LIMIT, hold_at, watched

database, fault, *http = sys.argv[1:]
server = MCPServer("reports", log_level="CRITICAL")
web = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical"))


@server.tool()
def create_report_job(report: str, key: str) -> CallToolResult:
    with open(f"{database}.calls", "a") as calls:
        print(key, file=calls)
    if not report:  # looked at before anything is done, so this is surely an answer
        status, text = "rejected", "a report needs a name"
    else:
        # An error raised here says nothing of COMMIT. It arrives as a result as well.
        at = fault if fault in retry_lab.FAULTS else "none"
        status, text = "done", f"job {retry_lab.create_job(database, key, report, at)}"
    return CallToolResult(
        content=[TextContent(type="text", text=text)],
        structured_content={"status": status},
        is_error=status != "done",
    )


def cut(statement: str) -> None:
    if statement.startswith("COMMIT"):
        for connection in list(web.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)


faulthandler.dump_traceback_later(LIMIT, exit=True)
with watched({"cut": cut, "held": hold_at("COMMIT")}.get(fault, str)):
    if http:
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        web.run(sockets=[listener])
    else:
        server.run()
