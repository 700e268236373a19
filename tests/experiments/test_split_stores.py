"""What if the queue and the receipts live in two databases?

Crash model: an attempt in a forked child that really dies, by os._exit or by a signal,
while the machine stays up. Then the retry, with the same key.

Found: with a transaction for each store, a death between the two parts them. Job first,
and the retry makes a second job; receipt first, and the retry answers with a job that
does not exist. With both files attached to one connection, the lab's own create_job
keeps them together through a death before each of its statements, and through one
inside COMMIT, when the job was in its file and the receipt was not. In WAL mode that
death inside COMMIT parts them, and no other tried here does: SQLite promises that a
transaction over attached files is atomic in a crash only where the main database is
not :memory: and the journal mode is not WAL. https://www.sqlite.org/lang_attach.html
"""

import os
import signal
import sqlite3
import unittest
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest import mock

from retry_lab import SCHEMA, create_job
from tests.support import EMPTY, FIRST_JOB, LabTest, posix
from tests.watch import ended, forked, watched

CONNECT = sqlite3.connect
TWO_JOBS = [(1, "weekly"), (2, "weekly")]
LONG_KEY = "op-a".ljust(100_000, "-")  # its receipt does not fit into 64 KiB


def end_of(attempt: "Callable[..., int]", *arguments: object) -> int:
    """Make an attempt in a forked process, to its death; return how it ended."""
    return ended(forked(attempt, *arguments))


def transact(path: str, statement: str, *values: object) -> "list[tuple]":
    """Run `statement` in a connection and a transaction of its own; return its rows."""
    with closing(CONNECT(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


@posix
class TwoFiles(LabTest):
    """Two files: the queue has the lab's table of jobs, the other that of receipts."""

    def new_stores(self, mode: str = "DELETE", name: str = "") -> None:
        self.queue = str(self.folder / f"{mode}{name}-queue.sqlite")
        self.receipts = str(self.folder / f"{mode}{name}-receipts.sqlite")
        for path, other in (self.queue, "receipts"), (self.receipts, "jobs"):
            with closing(CONNECT(path)) as connection:
                connection.execute(f"PRAGMA journal_mode = {mode}")
                connection.executescript(f"{SCHEMA} DROP TABLE {other}")

    def setUp(self) -> None:
        """Whoever opens the queue through sqlite3.connect has the receipts attached."""
        super().setUp()
        self.new_stores()
        patch = mock.patch("sqlite3.connect", self.connect_to_both)
        patch.start()
        self.addCleanup(patch.stop)

    def connect_to_both(self, queue: str, **options: object) -> sqlite3.Connection:
        connection = CONNECT(queue, **options)
        # No foreign key reaches across files, and SQLite checks none unless asked to.
        connection.execute("ATTACH ? AS receipts_store", (self.receipts,))
        return connection


class TwoTransactions(TwoFiles):
    def create_in_turn(self, job_first: bool, dies: bool) -> int:
        """Do for op-a what create_job does, in a transaction for each store."""
        query = "SELECT job_id FROM receipts WHERE key = 'op-a'"
        for (recorded,) in transact(self.receipts, query):
            return recorded
        # The id is chosen ahead, so that the receipt can be written first.
        ((job_id,),) = transact(self.queue, "SELECT count(*) + 1 FROM jobs")
        job = self.queue, "INSERT INTO jobs VALUES (?, 'weekly')"
        receipt = self.receipts, "INSERT INTO receipts VALUES ('op-a', 'weekly', ?)"
        for path, insert in (job, receipt) if job_first else (receipt, job):
            transact(path, insert, job_id)
            if dies:
                os._exit(17)
        return job_id

    def test_job_first_and_the_retry_makes_a_second_job(self) -> None:
        """Job first, then a death: no receipt, and the retry makes a second job."""
        self.assertEqual(end_of(self.create_in_turn, True, True), 17)
        self.assertEqual(self.rows(self.queue), ([(1, "weekly")], []))
        self.assertEqual(self.create_in_turn(True, False), 2)
        receipts = [("op-a", "weekly", 2)]
        self.assertEqual(self.rows(self.queue), (TWO_JOBS, receipts))

    def test_receipt_first_and_the_retry_answers_with_no_job(self) -> None:
        """Receipt first, then a death: the retry answers with a job that is nowhere."""
        self.assertEqual(end_of(self.create_in_turn, False, True), 17)
        self.assertEqual(self.rows(self.queue), ([], [("op-a", "weekly", 1)]))
        self.assertEqual(self.create_in_turn(False, False), 1)
        self.assertEqual(self.rows(self.queue), ([], [("op-a", "weekly", 1)]))


class OneTransaction(TwoFiles):
    def attempt(self, key: str = "op-a", fault: str = "none") -> int:
        return create_job(self.queue, key, "weekly", fault)

    def die_before(self, place: str) -> None:
        """Make an attempt, and die before the statement that starts with `place`."""

        def watch(statement: str) -> None:
            if statement.startswith(place):
                os._exit(17)

        with watched(watch):
            self.attempt()

    def die_inside_commit(self) -> None:
        """Make an attempt whose COMMIT writes the job and dies writing the receipt."""
        import resource  # POSIX only

        def watch(statement: str) -> None:
            if statement == "COMMIT":  # from here on, no file grows past 64 KiB
                resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores this signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with watched(watch):
            self.attempt(LONG_KEY)

    def test_attached_stores_stay_together_before_every_statement(self) -> None:
        """One transaction over both files: a death at any statement leaves no row."""
        steps = [
            "BEGIN",
            "SELECT",
            "INSERT INTO jobs",
            "INSERT INTO receipts",
            "COMMIT",
        ]
        for mode in ("DELETE", "WAL"):
            for number, step in enumerate(steps):
                with self.subTest(mode, died_before=step):
                    self.new_stores(mode, str(number))
                    self.assertEqual(end_of(self.die_before, step), 17)
                    self.assertEqual(self.rows(self.queue), EMPTY)
                    self.assertEqual(self.attempt(), 1)
                    self.assertEqual(self.rows(self.queue), FIRST_JOB)

    def test_attached_stores_stay_together_after_commit(self) -> None:
        """One transaction over both files: a death after COMMIT leaves both rows."""
        self.assertEqual(end_of(self.attempt, "op-a", "after_commit"), 18)
        self.assertEqual(self.rows(self.queue), FIRST_JOB)
        self.assertEqual(self.attempt(), 1)
        self.assertEqual(self.rows(self.queue), FIRST_JOB)

    def test_a_half_written_commit_is_taken_back(self) -> None:
        """The next reader undoes a COMMIT that died with the job already on file."""
        self.assertNotIn(b"weekly", Path(self.queue).read_bytes())
        self.assertEqual(end_of(self.die_inside_commit), -signal.SIGXFSZ)
        self.assertIn(b"weekly", Path(self.queue).read_bytes())
        self.assertEqual(self.rows(self.queue), EMPTY)
        self.assertEqual(self.attempt(LONG_KEY), 1)
        receipts = [(LONG_KEY, "weekly", 1)]
        self.assertEqual(self.rows(self.queue), ([(1, "weekly")], receipts))

    def test_in_wal_mode_a_half_written_commit_parts_the_stores(self) -> None:
        """In WAL mode that death leaves a job, no receipt; the retry makes a second."""
        self.new_stores("WAL")
        self.assertEqual(end_of(self.die_inside_commit), -signal.SIGXFSZ)
        self.assertEqual(self.rows(self.queue), ([(1, "weekly")], []))
        self.assertEqual(self.attempt(LONG_KEY), 2)
        receipts = [(LONG_KEY, "weekly", 2)]
        self.assertEqual(self.rows(self.queue), (TWO_JOBS, receipts))


if __name__ == "__main__":
    unittest.main()
