"""An MCP server around create_job: DATABASE, a fault of the lab or "cut", and [http]."""

import faulthandler
import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent

import retry_lab
from tests.watch import LIMIT, watched

database, fault, *http = sys.argv[1:]
server = MCPServer("reports", log_level="CRITICAL")
web = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical"))


@server.tool()
def create_report_job(report: str, key: str) -> CallToolResult:
    with open(f"{database}.calls", "a") as calls:
        calls.write(f"{key}\n")
    if not report:  # looked at before anything is done, so this is surely an answer
        status, text = "rejected", "a report needs a name"
    else:  # an error raised here comes as a result too, and says nothing of COMMIT
        at = "none" if fault == "cut" else fault
        status, text = "done", f"job {retry_lab.create_job(database, key, report, at)}"
    content = [TextContent(type="text", text=text)]
    answer = {"content": content, "structured_content": {"status": status}}
    return CallToolResult(**answer, is_error=status != "done")


def cut(statement: str) -> None:
    if fault == "cut" and statement.startswith("COMMIT"):
        for connection in list(web.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)


faulthandler.dump_traceback_later(LIMIT, exit=True)
with watched(cut):
    if not http:
        server.run()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        web.run(sockets=[listener])
