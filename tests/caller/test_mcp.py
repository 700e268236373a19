"""What does an MCP client hear when its call breaks off, and is there one job per wish?

Crash model: the server dies before or after COMMIT, or the stream is cut in mid-call.

Found: no end says whether the job is there, and nothing is sent again by itself. With
notes there is one job; with a new key there are two where the first was committed.
"""

import asyncio
import importlib
import logging
import os
import re
import sys
import unittest
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

from tests.support import EMPTY, ROOT, LabTest
from tests.watch import LIMIT

try:
    from mcp import Client, StdioServerParameters
except ImportError:
    if os.environ.get("RETRY_LAB_NEEDS_MCP") == "1":
        raise
    Client = None

logging.getLogger("runner").disabled = True  # its errors are wanted here
# How a call breaks off, and what is heard of it (no "except Exception" sees a
# CancelledError). Then come the jobs after a second call, with notes and without.
ENDS = [
    ("stdio", "before_commit", "MCPError: Connection closed", 1, 1),
    ("stdio", "after_commit", "MCPError: Connection closed", 1, 2),
    ("http", "before_commit", "CancelledError: ", 1, 1),
    ("http", "after_commit", "CancelledError: ", 1, 2),
    ("http", "cut", "CancelledError: ", 1, 2),
]


def loop_that_awaits(folder: Path) -> "list[ModuleType]":
    """Return agent_loop and its runner, with "async def" and "await" put in them."""
    calls = r"(= |not )(?=(take_turn|settle|send|reads\[name\])\()"
    for name in ("runner.py", "agent_loop.py"):
        source = Path(__file__).with_name(name).read_text(encoding="utf-8")
        source = re.sub(r"\bdef (?=(take_turn|settle|results)\()", "async def ", source)
        source = re.sub(calls, r"\1await ", source)
        (folder / name).write_text(source, encoding="utf-8")
    path = mock.patch.object(sys, "path", [str(folder), *sys.path])
    with mock.patch.dict(sys.modules), path:
        return [importlib.import_module(name) for name in ("agent_loop", "runner")]


@unittest.skipUnless(Client, "the package mcp is not installed")
class Mcp(LabTest):
    def begin(self, transport: str, fault: str = "none") -> None:
        self.heard, (self.loop, self.runner) = [], loop_that_awaits(self.folder)
        self.database = self.new_database(uuid.uuid4().hex)
        self.notes = self.loop.open_notes(f"{self.database}.notes")
        self.addCleanup(self.notes.close)
        self.serve(transport, fault)

    def serve(self, transport: str, fault: str = "none") -> None:
        command = ["-B", "-m", "tests.caller.mcp_server", self.database, fault]
        settings = {"command": sys.executable, "args": command, "cwd": ROOT}
        self.target = StdioServerParameters(**settings)
        if transport == "http":
            port = self.start(sys.executable, *command, "http").stdout.readline()
            self.target = f"http://127.0.0.1:{int(port)}/mcp"

    async def shown(self) -> dict:
        """Return the tool's schema as the model sees it: the key is the runner's."""
        async with asyncio.timeout(LIMIT), Client(self.target) as client:
            schema = (await client.list_tools()).tools[0].input_schema
        del schema["properties"]["key"]
        schema["required"].remove("key")
        return {**schema, "additionalProperties": False}  # it may send no key either

    async def call(self, **arguments: str) -> object:
        """Call the tool, by a client that ends in a group where the call breaks off."""
        async with asyncio.timeout(LIMIT), Client(self.target) as client:
            try:
                return await client.call_tool("create_report_job", arguments)
            except BaseException as error:
                self.heard.append(f"{type(error).__name__}: {error}")
                raise

    async def send(self, key: str, **arguments: str) -> str:
        result = await self.call(key=key, **arguments)
        text = result.content[0].text
        # Raised in the client, it would be in a group as well, and so be silence.
        if (result.structured_content or {}).get("status") == "rejected":
            raise self.runner.Rejected(text)
        if result.is_error:
            raise ConnectionError(text)
        return text

    def told(self, **arguments: str) -> str:
        """Let the model call the tool, in a turn of its own; return what it is told."""
        turn, call = uuid.uuid4().hex, ("call-1", "create_report_job", arguments)
        tool = SimpleNamespace(check=lambda report: 86400, send=self.send)
        tools = {"create_report_job": tool}
        results = self.loop.results(self.notes, turn, [call], tools, {})
        return asyncio.run(results)["call-1"][0]

    def test_a_call_breaks_off_and_the_model_calls_again(self) -> None:
        for transport, fault, heard, *jobs in ENDS:
            for forgets, wanted in zip((False, True), jobs):
                with self.subTest(f"{transport}, {fault}, forgets: {forgets}"):
                    self.begin(transport, fault)
                    self.assertRegex(self.told(report="weekly"), "^unknown: no answer")
                    self.assertRegex(self.heard.pop(), f"^{heard}")
                    if forgets:  # then its next call gets a key of its own
                        self.notes.execute("DELETE FROM notes")
                    self.serve(transport)
                    self.assertRegex(self.told(report="weekly"), f"^done: job {wanted}")
                    self.assertEqual(len(self.rows(self.database)[0]), wanted)
                    calls = Path(f"{self.database}.calls").read_text()
                    self.assertEqual(calls.count("\n"), 2)  # none went by itself

    def test_the_model_sees_no_key_and_an_error_is_silence(self) -> None:
        self.begin("http")
        self.assertNotIn("key", str(asyncio.run(self.shown())).lower())
        self.assertTrue(asyncio.run(self.call(report="weekly")).is_error)  # no key
        self.assertRegex(self.told(report="weekly", key="op-a"), "^rejected: TypeErr")
        self.assertRegex(self.told(report=""), "^rejected: a report needs a name")
        self.assertEqual(self.rows(self.database), EMPTY)
        asyncio.run(self.call(key="op-a", report="weekly"))
        conflict = asyncio.run(self.call(key="op-a", report="daily"))
        os.remove(self.database)
        self.assertEqual(asyncio.run(self.call(key="op-b", report="daily")), conflict)
        self.assertRegex(self.told(report="daily"), "^unknown: no answer")
