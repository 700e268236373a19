"""What if it dies anywhere else, and not only right before or after COMMIT?

Crash model: a worker process ends at once, by its own os._exit or by SIGKILL from
outside. Nobody cleans up, and the machine lives on. The points are the steps that create_job really
takes: each SQL statement, before SQLite begins it, and then closing the connection.
Death inside a statement is left to https://www.sqlite.org/atomiccommit.html

Found: wherever a call died, its key gets one job with one receipt at the next attempt,
and a rejected call changed nothing. A dead worker's lock dies with it. A job and receipt
not yet committed were never in the database file: all they leave is a journal.
"""

import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import unittest
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import retry_lab
from tests.support import (
    EMPTY,
    ERROR_LINE,
    FIRST_JOB,
    JOB_1,
    LAB,
    REJECTED,
    SOURCE,
    LabTest,
    posix,
    worker_command,
)
from tests.watch import ended, forked, watched

LOOK = ["BEGIN IMMEDIATE", "SELECT report, job_id"]
WRITE = ["INSERT INTO jobs", "INSERT INTO receipts"]


def start(watch: "Callable[[str], object]", *call: str) -> int:
    """Fork a worker that does `watch(step)` before each step of `call`; return its id."""

    def work() -> int:
        steps = watched(lambda sql: watch(" ".join(sql.split()[:3])))
        with steps, contextlib.redirect_stdout(io.StringIO()):
            return retry_lab.worker(list(call))

    return forked(work)


class CrashPoints(LabTest):
    def steps(self, last: str, *call: str) -> "tuple[int, list[str]]":
        """Let a worker exit with 40 before `last`; return its exit status and steps."""
        reader, writer = os.pipe()

        def watch(step: str) -> None:
            if step == last:
                os._exit(40)
            os.write(writer, f"{step}\n".encode())

        worker = start(watch, *call)
        os.close(writer)
        with open(reader) as taken:
            return ended(worker), taken.read().splitlines()

    def check(self, steps: "list[str]", report: str, answer: tuple, *keys: str) -> None:
        """Let a call die before each of its `steps`, then make it again: `answer`."""
        database = self.new_database()
        for key in keys:
            retry_lab.create_job(database, key, "weekly")
        call = ("op-a", report, "none")
        status, taken = self.steps("", shutil.copy(database, f"{database}-all"), *call)
        self.assertEqual((status, taken), (answer[0], steps))
        for number, step in enumerate(taken):
            with self.subTest(died_before=step):
                struck = shutil.copy(database, f"{database}-{number}")
                self.assertEqual(self.steps(step, struck, *call), (40, taken[:number]))
                # No look at the rows yet: the next call must manage without any help.
                self.assertEqual(self.call(struck, "op-a", report), answer)
                self.assertEqual(self.call(struck, "op-a"), JOB_1)
                self.assertEqual(self.rows(struck), FIRST_JOB)

    @posix
    def test_a_first_call_may_die_anywhere(self) -> None:
        """Wherever a first call dies, the same key again has one job and receipt."""
        self.check([*LOOK, *WRITE, "COMMIT", "close"], "weekly", JOB_1)

    @posix
    def test_a_replay_may_die_anywhere(self) -> None:
        """Wherever a replay dies, the same key again is answered with the same job."""
        self.check([*LOOK, "COMMIT", "close"], "weekly", JOB_1, "op-a")

    @posix
    def test_a_conflict_may_die_anywhere(self) -> None:
        """Wherever a conflict dies, it is rejected again and its key still replays."""
        self.check([*LOOK, "close"], "daily", REJECTED, "op-a")

    @posix
    def test_a_kill_in_mid_transaction_blocks_nobody(self) -> None:
        """A worker killed while it holds the write lock blocks no next attempt."""
        database = self.new_database()
        here, there = multiprocessing.Pipe()

        def hold(step: str) -> None:
            if step == "COMMIT":
                here.close()  # or the worker would outlive a test run that is gone
                there.send(step)
                there.recv()

        worker = start(hold, database, "op-a", "weekly", "none")
        there.close()
        with here, closing(sqlite3.connect(database, timeout=0)) as other:
            try:
                self.assertEqual(here.recv(), "COMMIT")
                with self.assertRaisesRegex(sqlite3.OperationalError, "locked"):
                    other.execute("BEGIN IMMEDIATE")
            finally:
                os.kill(worker, signal.SIGKILL)
                status = ended(worker)
        self.assertEqual(status, -signal.SIGKILL)
        self.assertEqual(self.call(database, "op-a"), JOB_1)
        self.assertEqual(self.rows(database), FIRST_JOB)

    def test_a_death_before_commit_leaves_the_rollback_journal(self) -> None:
        """A death before COMMIT leaves the journal that a polite exit would remove."""
        polite = self.folder / "polite_lab.py"
        polite.write_text(SOURCE.replace("os._exit", "sys.exit"), encoding="utf-8")
        for lab, left in ((polite, False), (LAB, True)):
            database = self.new_database(f"{lab.stem}.sqlite")
            journal, before = Path(f"{database}-journal"), Path(database).read_bytes()
            died = self.call(database, "op-a", fault="before_commit", lab=lab)
            self.assertEqual((died, journal.exists()), ((17, "", ""), left))
            # Nothing is there to undo: not one byte of the database file has changed.
            self.assertEqual(Path(database).read_bytes(), before)
            self.assertEqual(self.call(database, "op-a"), JOB_1)
            self.assertEqual(self.rows(database), FIRST_JOB)
            self.assertFalse(journal.exists())

    @posix
    def test_a_death_runs_no_finally(self) -> None:
        """A worker that dies before or after COMMIT never closes its connection."""
        before, after = [*LOOK, *WRITE], [*LOOK, *WRITE, "COMMIT"]  # and no "close"
        for fault, died, rows in (
            ("before_commit", (17, before), EMPTY),
            ("after_commit", (18, after), FIRST_JOB),
        ):
            database = self.new_database(f"{fault}.sqlite")
            self.assertEqual(self.steps("", database, "op-a", "weekly", fault), died)
            self.assertEqual(self.rows(database), rows)

    @posix
    def test_a_lost_acknowledgment_is_replayed(self) -> None:
        """The caller hangs up before the answer: the job is made, a retry replays."""
        database = self.new_database()
        command = worker_command(database, "op-a", "weekly", "none")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with closing(sqlite3.connect(database)) as other:
            other.execute("BEGIN IMMEDIATE")  # until this ends, the worker has to wait
            with subprocess.Popen(command, text=True, **pipes) as worker:
                worker.stdout.close()
                other.rollback()
                self.assertRegex(worker.stderr.read(), ERROR_LINE)
        self.assertEqual((worker.returncode, self.rows(database)), (1, FIRST_JOB))
        self.assertEqual(self.call(database, "op-a"), JOB_1)
        self.assertEqual(self.rows(database), FIRST_JOB)


if __name__ == "__main__":
    unittest.main()
