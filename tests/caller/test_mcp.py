"""What does an MCP client hear when its call breaks off, and is there one job per wish?

Crash model: the server's process dies before or after COMMIT, the stream is cut in
mid-call, or the client stops waiting. Then the client connects again. Servers, clients
and transports are those of the official package.

Found: the call ends in three ways, and none says whether the job is there. Nothing is
sent again by itself. With notes there is one job. With a key for each call there are
two wherever the first one was committed.
"""

import asyncio
import importlib
import json
import os
import re
import sys
import unittest
import uuid
from pathlib import Path
from unittest import mock

from tests.support import ROOT, LabTest
from tests.watch import LIMIT

try:
    import jsonschema
    from mcp import Client, StdioServerParameters
except ImportError as missing:
    if os.environ.get("RETRY_LAB_NEEDS_MCP") == "1":
        raise
    raise unittest.SkipTest(f"it needs the package mcp: {missing}") from missing

CLOSED = "MCPError: Connection closed"
CANCELLED = "CancelledError: "  # which no "except Exception" sees
TIMED_OUT = "MCPError: Request 'tools/call' timed out"
# How a call breaks off: the transport, the fault, and what is heard of it. Then come the
# jobs after the model's second call, with notes and with a key for each call.
ENDS = [
    ("stdio", "before_commit", CLOSED, 1, 1),
    ("stdio", "after_commit", CLOSED, 1, 2),
    ("http", "before_commit", CANCELLED, 1, 1),
    ("http", "after_commit", CANCELLED, 1, 2),
    ("http", "cut", CANCELLED, 1, 2),
    ("http", "held", TIMED_OUT, 1, 2),
]
# The edits for a loop that awaits, in runner.py and agent_loop.py.
EDITS = [
    (r"def (?=(take_turn|settle|results)\()", "async def "),
    (r"(?<!def )\b(?=(take_turn|settle|send|tool\.run)\()", "await "),
]


def loop_that_awaits(folder: Path) -> object:
    """Return the module agent_loop, with EDITS made in it and in its runner."""
    for name in ("runner.py", "agent_loop.py"):
        source = Path(__file__).with_name(name).read_text(encoding="utf-8")
        for pattern, new in EDITS:
            source = re.sub(pattern, new, source)
        (folder / name).write_text(source, encoding="utf-8")
    path = [str(folder), *sys.path]
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", path):
        return importlib.import_module("agent_loop")


class Mcp(LabTest):
    def setUp(self) -> None:
        super().setUp()
        self.loop = loop_that_awaits(self.folder)
        self.wait = LIMIT

    def begin(self, name: str, transport: str, fault: str = "none") -> object:
        """Begin a conversation, with a service of its own; do as serve does."""
        self.database, self.heard = self.new_database(name), []
        self.notes = self.loop.open_notes(f"{self.database}.notes")
        self.addCleanup(self.notes.close)
        return self.serve(transport, fault)

    def serve(self, transport: str, fault: str = "none") -> object:
        """Let calls go to a new server; return its process, if it runs by now."""
        command = ["-B", "-m", "tests.caller.mcp_server", self.database, fault]
        if transport == "stdio":
            options = {"command": sys.executable, "args": command, "cwd": ROOT}
            self.target = StdioServerParameters(**options)
            return None
        process = self.start(sys.executable, *command, transport)
        self.target = f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        return process

    async def call(self, **arguments: object) -> object:
        """Call the tool, and note what is raised as the code at that place sees it."""
        client = Client(self.target, read_timeout_seconds=self.wait)
        async with asyncio.timeout(LIMIT), client:
            (tool,) = (await client.list_tools()).tools
            self.schema = tool.input_schema
            try:
                return await client.call_tool(tool.name, arguments)
            except BaseException as error:
                self.heard.append(f"{type(error).__name__}: {error}")
                raise

    async def attempt(self, **arguments: object) -> str:
        """Return the tool's answer; raise Rejected, or anything else for silence."""
        result = await self.call(**arguments)
        text = result.content[0].text
        # Not inside the client, which wraps what is raised in exception groups.
        if (result.structured_content or {}).get("status") == "rejected":
            raise self.loop.Rejected(text)
        if result.is_error:  # raised in the tool, before COMMIT or after it
            raise ConnectionError(text)
        return text

    def by_notes(self, **arguments: object) -> str:
        """Let the model call the tool; return what it is told."""

        def check(**arguments: object) -> None:
            pass

        call = {"id": "call-1", "name": "create_report_job"}
        call["arguments"] = json.dumps(arguments)
        message = {"id": uuid.uuid4().hex, "calls": [call]}
        tools = {"create_report_job": self.loop.Tool(self.attempt, check, 86400)}
        (result,) = asyncio.run(self.loop.results(self.notes, message, tools))
        return result["text"]

    def by_a_key_per_call(self, **arguments: object) -> str:
        try:
            return asyncio.run(self.attempt(key=uuid.uuid4().hex, **arguments))
        except Exception as error:  # the client as a whole ends in a group
            return repr(error)

    def test_a_call_breaks_off_and_the_model_calls_again(self) -> None:
        for transport, fault, heard, *jobs in ENDS:
            for way, wanted in zip((self.by_notes, self.by_a_key_per_call), jobs):
                name = f"{transport}-{fault}-{way.__name__}"
                with self.subTest(name):
                    process = self.begin(name, transport, fault)
                    self.wait = 2 if fault == "held" else LIMIT
                    first = way(report="weekly")
                    if fault == "held":  # the call had arrived, and now it commits
                        self.assertEqual(process.stderr.readline(), "COMMIT\n")
                        process.stdin.close()
                    self.wait = LIMIT
                    self.serve(transport)
                    second = way(report="weekly")
                    ((seen,), calls) = self.heard, Path(f"{self.database}.calls")
                    print(name, seen, first, second, self.rows(self.database), calls.read_text())
