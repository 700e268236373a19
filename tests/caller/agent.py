"""A whole agent: agent.py FOLDER [STEP] goes on from what FOLDER holds.

It is killed before its STEP-th SQL statement that is no SELECT.
"""

import contextlib
import json
import os
import signal
import sqlite3
import sys
from collections import namedtuple

from agent_loop import open_notes, results, unknown

import retry_lab
from tests.watch import watched

Tool = namedtuple("Tool", "check send")
WEEKLY = ("create_report", {"format": "pdf", "report": "weekly"})
WISHES = [WEEKLY, WEEKLY, ("create_invoice", {"customer": "acme"})]
BAD = [("create_repot", {}), ("create_report", {}), ("create_report", "{no JSON")]
BAD += [("create_report", {"format": "pdf", "report": "\ud83d"})]


def model(turns: "list[tuple[list, dict]]") -> "list[tuple]":
    """Call at once for whatever is wished and was not told to be done; and look."""
    left = list(WISHES)
    for calls, told in turns:
        for call_id, *wish in calls:
            if told[call_id][0].startswith("done"):
                left.remove(tuple(wish))
    if len(turns) % 2:  # the same calls, with their fields in another order
        left = [(name, dict(sorted(a.items())[::-1])) for name, a in left]
    calls = [*left, ("list_jobs", {}), *([] if turns else BAD)] if left else []
    return [(f"call-{len(turns)}-{n}", *call) for n, call in enumerate(calls)]


def main(folder: str) -> None:
    notes = open_notes(f"{folder}/notes.sqlite")
    chat = sqlite3.connect(f"{folder}/chat.sqlite", isolation_level=None)
    chat.execute(
        "CREATE TABLE IF NOT EXISTS turns (calls TEXT, told TEXT, listed TEXT)"
    )
    database, answered = f"{folder}/service.sqlite", []

    def create(key: str, report: str, format: str) -> int:
        answered.append(retry_lab.create_job(database, key, report))
        if len(answered) == 1:
            raise TimeoutError("each process loses the first answer")
        return answered[-1]

    def invoice(key: str, customer: str) -> str:
        return f"invoice {create(key, customer, 'pdf')}"

    def list_jobs(arguments: dict) -> "tuple[str, bool]":
        jobs = sqlite3.connect(database)
        (count,) = jobs.execute("SELECT count(*) FROM jobs").fetchone()
        jobs.close()
        return f"{count} jobs", False

    reads = {"list_jobs": list_jobs}
    tools = {
        "create_report": Tool(lambda report, format: 3600, create),
        "create_invoice": Tool(lambda customer: 60, invoice),
    }
    while True:
        saved = chat.execute("SELECT calls, told FROM turns").fetchall()
        turns = [[json.loads(text or "null") for text in row] for row in saved]
        if not turns or turns[-1][1]:  # else it was killed in the last one
            calls = model(turns)
            chat.execute(
                "INSERT INTO turns VALUES (?, NULL, NULL)", [json.dumps(calls)]
            )
            continue
        calls = turns[-1][0]
        if not calls:
            return
        told = results(notes, f"turn-{len(turns)}", calls, tools, reads)
        listed = [note["request"] for note in unknown(notes)]
        save = "UPDATE turns SET told = ?, listed = ? WHERE told IS NULL"
        chat.execute(save, [json.dumps(told), json.dumps(listed)])


if __name__ == "__main__":
    folder, *step = sys.argv[1:]
    left = int(*step)

    def die(statement: str) -> None:
        global left
        left -= not statement.startswith("SELECT")
        if left == 0:  # on Windows SIGTERM ends a process as hard
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    with watched(die) if step else contextlib.nullcontext():
        main(folder)
