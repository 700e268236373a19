"""Does a real loop give each of a message's calls one result, and make what was wished?

Crash model: the agent's process is killed before each of its SQL statements, those of
its tools and of its saved chat among them, and started again. Each process also loses
the first answer of a tool, after COMMIT.

Found: every wish has one job, every call has one result, and each job is told once. The
lock on the notes goes with the process that held it.
"""

import json
import os
import re
import sqlite3
import subprocess
import unittest
from collections import Counter
from contextlib import closing
from pathlib import Path

from tests.support import ROOT, LabTest, end, environment, run, side_by_side
from tests.watch import held_command

HERE = Path(__file__).resolve().parent
AGENT = HERE / "agent.py"
ENVIRONMENT = environment(PYTHONPATH=os.pathsep.join((str(HERE), str(ROOT))))
WISHED = Counter({"report weekly": 2, "invoice acme": 1})
BAD = ["KeyError", "TypeError", "UnicodeEncodeError", "TypeError"]


class AgentLoop(LabTest):
    def new_folder(self, name: str) -> Path:
        """Make a folder with an empty service; return its path."""
        (self.folder / name).mkdir()
        self.new_database(f"{name}/service.sqlite")
        return self.folder / name

    def agent(self, folder: Path, step: int = 0) -> "subprocess.CompletedProcess[str]":
        """Let an agent go on in `folder`, to its end or until it is killed."""
        return run("-B", "-S", AGENT, folder, step, env=ENVIRONMENT)

    def assert_right(self, folder: Path) -> None:
        """There is a job for each wish, a result for each call, and a text for each job."""
        jobs, _ = self.rows(str(folder / "service.sqlite"))
        self.assertEqual(Counter(report for _, report in jobs), WISHED)
        with closing(sqlite3.connect(folder / "chat.sqlite")) as chat:
            turns = chat.execute("SELECT calls, told FROM turns").fetchall()
        done, statuses = [], Counter()
        for calls, told in turns:
            ids = [call_id for call_id, *_ in json.loads(calls)]
            results = json.loads(told)
            self.assertEqual(sorted(results), sorted(ids))
            for text, is_error in results.values():
                done += re.findall(r"\Adone: (job \d+)", text)
                self.assertEqual(is_error, not text.startswith(("done", "jobs: ")))
            rejected = re.findall(r'"rejected: (\w+)', told.replace("'", '"'))
        self.assertEqual(sorted(done), ["job 1", "job 2", "job 3"])

    def test_an_agent_killed_at_each_statement_goes_on(self) -> None:
        def killed(step: int) -> bool:
            folder = self.new_folder(str(step))
            first, then = self.agent(folder, step), self.agent(folder)
            with self.subTest(step=step):
                self.assertEqual((then.returncode, then.stdout), (0, ""), then.stderr)
                self.assert_right(folder)
            return first.returncode != 0
        ...
