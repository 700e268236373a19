"""A whole agent, to be killed: a scripted model, its tools, and a chat that is saved.

agent.py FOLDER [STEP]   is killed just before its STEP-th SQL statement
"""

import json
import os
import signal
import sqlite3
import sys
from collections import Counter, namedtuple
from pathlib import Path

from agent_loop import open_notes, results

import retry_lab
from tests.watch import watched

WISHES = Counter(["create_report weekly", "create_report weekly", "create_invoice acme"])
Tool = namedtuple("Tool", "check send")


def model(turns: "list[tuple[list, dict]]") -> "list[tuple]":
    """Call at once for whatever is wished and was not told to be done; and look."""
    left = Counter(WISHES)
    for calls, told in turns:
        for call_id, name, arguments in calls:
            if told[call_id][0].startswith("done: job"):
                left[f"{name} {arguments['title']}"] -= 1
    wanted = [(name, {"title": t}) for name, t in map(str.split, left.elements())]
    if wanted:
        wanted.insert(1, ("list_jobs", {}))
    if not turns:  # four that can't be sent, between those that can
        bad = {}, {"title": "\ud83d"}, "{not JSON"
        wanted[1:1] = [("create_repot", {}), *(("create_report", b) for b in bad)]
    return [(f"call-{len(turns)}-{n}", *call) for n, call in enumerate(wanted)]


class Service:
    """Two tools with effects and one without, around the lab's create_job."""

    def __init__(self, database: str) -> None:
        self.database, self.lost = database, False

    def create(self, kind: str, key: str, title: str) -> str:
        job_id = retry_lab.create_job(self.database, key, f"{kind} {title}")
        if not self.lost:  # the first answer, in each process
            self.lost = True
            raise TimeoutError
        return f"job {job_id}"

    def list_jobs(self, arguments: dict) -> "tuple[str, bool]":
        jobs = sqlite3.connect(self.database)
        rows = jobs.execute("SELECT report FROM jobs").fetchall()
        jobs.close()
        return f"{len(rows)} jobs", False


def main(folder: Path) -> None:
    """Go on from what was saved, until the model has nothing left to call."""
    notes = open_notes(folder / "notes.sqlite")
    chat = sqlite3.connect(folder / "chat.sqlite", isolation_level=None)
    chat.execute("CREATE TABLE IF NOT EXISTS turns (calls TEXT, told TEXT)")
    service = Service(str(folder / "service.sqlite"))
    tools = {
        f"create_{kind}": Tool(
            lambda title: 60.0, lambda key, title, kind=kind: service.create(kind, key, title)
        )
        for kind in ("report", "invoice")
    }
    while True:
        saved = chat.execute("SELECT calls, told FROM turns").fetchall()
        turns = [[json.loads(text or "null") for text in row] for row in saved]
        if not turns or turns[-1][1]:
            turns.append((model(turns), None))
            if not turns[-1][0]: return
            chat.execute(
                "INSERT INTO turns VALUES (?, NULL)", [json.dumps(turns[-1][0])]
            )
        told = results(notes, f"turn-{len(turns)}", turns[-1][0], tools, {"list_jobs": service.list_jobs})
        chat.execute("UPDATE turns SET told = ? WHERE told IS NULL", [json.dumps(told)])


if __name__ == "__main__":
    left = int((sys.argv[2:] or ["0"])[0])

    def count(statement: str) -> None:
        global left
        left -= 1
        if left == 0:  # on Windows SIGTERM ends a process as hard
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    with watched(count):
        main(Path(sys.argv[1]))
