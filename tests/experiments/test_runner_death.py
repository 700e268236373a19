"""What if the runner dies, and not only the worker that it called?

Crash model: SIGKILL strikes the runner, the caller's process. Its worker lives on as an
orphan in mid-transaction, or dies with it. What was committed to a file stays.

Found: a note of the key, committed before the first attempt, is enough. Wherever the
runner dies, its successor sends the key in the note again, and there is one job. With
no note the successor can only mint another key, and there are two.

Two records, two owners: the note is the caller's, the receipt is the service's.
"""

import os
import signal
import sqlite3
import subprocess
import unittest
import uuid
from contextlib import closing

from tests.support import (
    ROOT,
    WORKER,
    LabTest,
    environment,
    held_command,
    worker_command,
)

# The caller's half of the pattern, to carry home: a table of its own and two functions.
# A note's state is planned (surely not sent yet), sent (may be done), or answered.
NOTES = """CREATE TABLE IF NOT EXISTS notes (operation TEXT NOT NULL PRIMARY KEY,
    key TEXT NOT NULL, report TEXT NOT NULL, state TEXT NOT NULL, answer INTEGER)"""


def plan(notes: sqlite3.Connection, operation: str, report: str) -> None:
    """Mint the key of `operation`, once, and write it down before any attempt."""
    # A successor that plans the operation again keeps the key that stands there.
    insert = (
        "INSERT INTO notes VALUES (?, ?, ?, 'planned', NULL) ON CONFLICT DO NOTHING"
    )
    notes.execute(insert, (operation, uuid.uuid4().hex, report))
    query = "SELECT report FROM notes WHERE operation = ?"
    if notes.execute(query, (operation,)).fetchone() != (report,):
        raise ValueError(f"{operation} is planned with another report")


def carry_out(notes: sqlite3.Connection, worker: "tuple[str, ...]") -> None:
    """Make an attempt at each operation that has no answer yet, up to a silence."""
    # Sent without an answer means unknown: the same key goes out with the same report.
    unanswered = "SELECT key, report FROM notes WHERE state != 'answered'"
    for key, report in notes.execute(unanswered).fetchall():
        # Before the call: after it, "planned" would no longer mean "surely not sent".
        notes.execute("UPDATE notes SET state = 'sent' WHERE key = ?", (key,))
        answer = call(worker, key, report)
        # After the acknowledgment: before it, a death would pass for an answer.
        answered = "UPDATE notes SET state = 'answered', answer = ? WHERE key = ?"
        notes.execute(answered, (answer, key))


def call(worker: "tuple[str, ...]", key: str, report: str) -> int:
    """Return the job id that a worker process answers; raise if there is no answer."""
    command = [*worker, key, report, "none"]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def runner(path: str, *worker: str) -> None:
    """Be a runner; a successor does just the same."""
    # With isolation_level=None each statement is committed when it is done.
    with closing(sqlite3.connect(path, isolation_level=None)) as notes:
        notes.execute(NOTES)
        plan(notes, "report of week 48", "weekly")
        carry_out(notes, worker)


def late_writer(path: str, *worker: str) -> None:
    """Be a runner that writes its note only when it has the answer."""
    with closing(sqlite3.connect(path, isolation_level=None)) as notes:
        notes.execute(NOTES)
        key = uuid.uuid4().hex
        note = ("report of week 48", key, "weekly", call(worker, key, "weekly"))
        notes.execute("INSERT INTO notes VALUES (?, ?, ?, 'answered', ?)", note)


@unittest.skipUnless(os.name == "posix", "SIGKILL and orphans are POSIX's")
class RunnerDeath(LabTest):
    def setUp(self) -> None:
        super().setUp()
        self.database, self.notes = self.new_database(), self.folder / "notes.sqlite"
        self.lean = worker_command(self.database)
        self.held = held_command("COMMIT", WORKER, self.database)

    def start(
        self, worker: list, at: str = "-", who: str = "runner"
    ) -> subprocess.Popen:
        """Start a runner, held at `at`; its worker has the same stdin and stderr."""
        code = f"from tests.test_runner_death import {who}; {who}(*call)"
        command = held_command(at, code, str(self.notes), *worker)
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        settings = {"cwd": ROOT, "env": environment(), "start_new_session": True}
        started = subprocess.Popen(command, **pipes, **settings)
        self.addCleanup(started.__exit__, None, None, None)  # close its pipes, wait
        return started

    def killed(
        self, at: str, worker: list, who: str = "runner", kill: object = os.kill
    ) -> subprocess.Popen:
        """Start a runner; kill it when it, or its worker, has come to `at`."""
        dead = self.start(worker, at, who)
        self.assertEqual(dead.stderr.readline(), at + "\n")
        kill(dead.pid, signal.SIGKILL)
        self.assertEqual(dead.wait(), -signal.SIGKILL)
        return dead

    def orphan_commits(self, dead: subprocess.Popen) -> None:
        """Let the worker of a dead runner go on, and wait until it is gone as well."""
        self.assertEqual(self.rows(self.database), ([], []))
        dead.stdin.close()
        # It commits, and then its answer reaches nobody. Its exit ends the pipe.
        self.assertEqual(dead.stderr.read(), "error: [Errno 32] Broken pipe\n")

    def finishes(self, successor: subprocess.Popen) -> None:
        self.assertEqual((successor.stderr.read(), successor.wait()), ("", 0))

    def look(self) -> "tuple[str, tuple, tuple]":
        """Return the only note's key, its state and answer, and the service's rows."""
        with closing(sqlite3.connect(self.notes)) as notes:
            ((key, *note),) = notes.execute("SELECT key, state, answer FROM notes")
        return key, tuple(note), self.rows(self.database)

    def assert_one_job(self, key: str) -> None:
        rows = ([(1, "weekly")], [(key, "weekly", 1)])
        self.assertEqual(self.look(), (key, ("answered", 1), rows))

    def assert_two_jobs(self) -> None:
        """Two jobs, and the note knows only the key and the job of the second."""
        key, note, (jobs, receipts) = self.look()
        self.assertEqual(note, ("answered", 2))
        self.assertEqual(jobs, [(1, "weekly"), (2, "weekly")])
        lost_key = receipts[0][0]
        self.assertEqual(receipts, [(lost_key, "weekly", 1), (key, "weekly", 2)])

    def test_a_successor_that_reads_the_note_replays(self) -> None:
        """Killed in mid-call: the successor sends the note's key and gets that job."""
        dead = self.killed("COMMIT", self.held)
        key, note, _ = self.look()
        self.assertEqual(note, ("sent", None))
        successor = self.start(held_command("BEGIN IMMEDIATE", WORKER, self.database))
        self.assertEqual(successor.stderr.readline(), "BEGIN IMMEDIATE\n")
        successor.stdin.close()  # its worker goes for the lock, which the orphan has
        self.orphan_commits(dead)
        self.finishes(successor)
        self.assert_one_job(key)

    def test_a_successor_that_mints_a_fresh_key_makes_a_second_job(self) -> None:
        """Killed in mid-call: a successor that has no note makes a second job."""
        self.orphan_commits(self.killed("COMMIT", self.held))
        os.remove(self.notes)
        self.finishes(self.start(self.lean))
        self.assert_two_jobs()

    def test_a_key_written_down_after_the_call_is_lost(self) -> None:
        """A key written down only with the answer is lost when the runner is killed."""
        self.orphan_commits(self.killed("COMMIT", self.held, who="late_writer"))
        with closing(sqlite3.connect(self.notes)) as notes:
            self.assertEqual(notes.execute("SELECT * FROM notes").fetchall(), [])
        self.finishes(self.start(self.lean))
        self.assert_two_jobs()

    def test_a_runner_killed_before_the_call_leaves_its_key(self) -> None:
        """Killed between planned and sent: the successor sends the key; one job."""
        self.killed("UPDATE notes SET state = 'sent'", self.lean)
        key, *seen = self.look()
        self.assertEqual(seen, [("planned", None), ([], [])])
        self.finishes(self.start(self.lean))
        self.assert_one_job(key)

    def test_an_answer_that_was_not_written_down_is_replayed(self) -> None:
        """Killed between the answer and its note: the successor gets it once more."""
        self.killed("UPDATE notes SET state = 'answered'", self.lean)
        key, *seen = self.look()
        rows = ([(1, "weekly")], [(key, "weekly", 1)])
        self.assertEqual(seen, [("sent", None), rows])
        self.finishes(self.start(self.lean))
        self.assert_one_job(key)

    def test_a_worker_killed_with_its_runner_leaves_nothing_to_replay(self) -> None:
        """Both killed before COMMIT: no job is there, and the note's key makes it."""
        dead = self.killed("COMMIT", self.held, kill=os.killpg)
        self.assertEqual(dead.stderr.read(), "")  # it ends: the worker is gone as well
        key, *seen = self.look()
        self.assertEqual(seen, [("sent", None), ([], [])])
        self.finishes(self.start(self.lean))
        self.assert_one_job(key)


if __name__ == "__main__":
    unittest.main()
