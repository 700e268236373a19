"""Does a real loop give each of a message's calls one result, and make what was wished?

Crash model: the agent's process is killed before each SQL statement, those of its tools
and of its saved chat among them, and started again. Each process also loses the first
answer of a tool, after COMMIT.

Found: each wish has one job, and each call one result. No job is told twice. The lock
on the notes goes with the process that held it.
"""

import itertools
import json
import os
import re
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.support import ROOT, LabTest, environment, run, side_by_side
from tests.watch import LIMIT, held_command

AGENT = Path(__file__).resolve().with_name("agent.py")
VARIABLES = environment(PYTHONPATH=os.pathsep.join((str(AGENT.parent), str(ROOT))))
KILLED = -signal.SIGKILL if os.name == "posix" else signal.SIGTERM
REASONS = ["KeyError", "TypeError", "TypeError", "UnicodeEncodeError"]


class AgentLoop(LabTest):
    def new_folder(self, name: object) -> Path:
        (self.folder / str(name)).mkdir()
        return Path(self.new_database(f"{name}/service.sqlite")).parent

    def agent(self, folder: Path, *step: int) -> "tuple[int, str]":
        """Let an agent go on to its end or its death; return exit status and stderr."""
        done = run("-B", "-S", AGENT, folder, *step, env=VARIABLES)
        return done.returncode, done.stderr

    def assert_right(self, folder: Path) -> None:
        jobs, _ = self.rows(str(folder / "service.sqlite"))
        self.assertEqual(sorted(job[1] for job in jobs), ["acme", "weekly", "weekly"])
        with closing(sqlite3.connect(folder / "chat.sqlite")) as chat:
            turns = chat.execute("SELECT * FROM turns").fetchall()
        (*turns, last) = [[json.loads(text or "{}") for text in row] for row in turns]
        self.assertEqual(last, [[], {}, {}])  # the model had nothing left to call
        told = []
        for calls, results, listed in turns:
            self.assertEqual(sorted(results), [call_id for call_id, *_ in calls])
            self.assertEqual(len(listed), "unknown: " in str(results))  # for a person
            told += [(name, *results[call_id]) for call_id, name, _ in calls]
        succeeded = "\n".join(text for _, text, is_error in told if not is_error)
        done = re.findall(r"^done: (?:invoice )?(\d)", succeeded, re.MULTILINE)
        self.assertEqual(done, ["1", "2", "3"])
        looks = [is_error for name, _, is_error in told if name == "list_jobs"]
        self.assertEqual(looks, [False] * len(turns))
        reasons = re.findall(r"rejected: (\w+)", str(turns[0][1]))
        self.assertEqual(reasons, REASONS)

    def killed(self, step: int) -> bool:
        """Kill an agent at `step`, and start it again; return whether it was killed."""
        folder = self.new_folder(step)
        status, complaints = self.agent(folder, step)
        self.assertIn(status, (0, KILLED), f"step {step}: {complaints}")
        last, complaints = self.agent(folder)
        self.assertEqual(last, 0, f"step {step}: {complaints}")
        self.assert_right(folder)
        return status == KILLED

    def test_killed_at_each_statement_it_goes_on(self) -> None:
        killed, steps = True, itertools.count(1)
        while killed:
            killed = all(side_by_side(self.killed, itertools.islice(steps, 12)))
        self.assertGreater(next(steps), 50)

    def test_one_conversation_is_held_by_one_process(self) -> None:
        folder = self.new_folder("held")
        command = held_command("INSERT INTO turns", AGENT, folder)
        holder = self.start(*command, env=VARIABLES)
        self.assertEqual(holder.stderr.readline(), "INSERT INTO turns\n")
        status, complaint = self.agent(folder)
        self.assertEqual(status, 1)
        self.assertRegex(complaint, "OperationalError: database is locked\n\\Z")
        holder.kill()
        holder.wait(LIMIT)
        self.assertEqual(self.agent(folder)[0], 0)
        self.assert_right(folder)
