"""What if the first call is still running when the next attempt arrives?

Crash model: nobody dies. Worker processes are stopped in mid-transaction and go on when
the test lets them, so that two calls overlap just as each test says.

Found: the next attempt waits for the write lock, looks only then, and replays. If its
wait is over first, that is an error and no answer: the same key goes out again later.
To see no job during a call in flight proves nothing. The rule is to lock, then look;
SQLite's own locking and the primary key are backstops, and they answer with errors.
All of this holds with a rollback journal and in WAL mode alike.
"""

import sqlite3
import subprocess
import unittest
from contextlib import closing
from pathlib import Path
from unittest import mock

import retry_lab
from tests.support import EMPTY, FIRST_JOB, JOB_1, LAB, ROOT, LabTest, environment
from tests.watch import held_command, watched


def end(process: "subprocess.Popen[str]") -> "tuple[int, str, str]":
    """Let `process` go on; return how it ends: exit status, stdout and stderr."""
    process.stdin.close()
    return process.wait(), process.stdout.read(), process.stderr.read()


class InFlight(LabTest):
    journal_mode = "DELETE"  # SQLite's own choice, a rollback journal

    def setUp(self) -> None:
        super().setUp()
        mode = f"PRAGMA journal_mode = {self.journal_mode};"
        self.database = self.new_database(pragma=mode)
        self.locked = (1, "", f"error: database is locked: {self.database!r}\n")

    def held(self, place: str, key: str = "op-a", lab: Path = LAB) -> subprocess.Popen:
        """Start a worker; return it when it has come to `place`, where it waits."""
        call = ("worker", self.database, key, "weekly", "none")
        command = held_command(place, lab, *call)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        settings = {"cwd": ROOT, "env": environment(), "text": True}
        process = subprocess.Popen(command, **pipes, **settings)
        self.addCleanup(process.__exit__, None, None, None)  # close its pipes, wait
        self.assertEqual(process.stderr.readline(), place + "\n")
        return process

    def released_together(self, keys: "list[str]") -> "list[tuple[int, str, str]]":
        """Bring a worker for each key to the lock, let all go, return how they end."""
        workers = [self.held("BEGIN IMMEDIATE", key) for key in keys]
        for process in workers:
            process.stdin.close()
        return [end(process) for process in workers]

    def test_eight_calls_with_one_key_make_one_job(self) -> None:
        """Eight workers at once with one key: one job, and all answer with its id."""
        self.assertEqual(self.released_together(["op-a"] * 8), [JOB_1] * 8)
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_eight_calls_with_eight_keys_make_eight_jobs(self) -> None:
        """Eight workers at once with eight keys: eight jobs, and to each its own."""
        keys = [f"op-{number}" for number in range(8)]
        ends = dict(zip(keys, self.released_together(keys)))
        jobs, receipts = self.rows(self.database)
        self.assertEqual(jobs, [(number, "weekly") for number in range(1, 9)])
        self.assertEqual([job_id for _, _, job_id in receipts], list(range(1, 9)))
        self.assertEqual({key: (0, f"{id_}\n", "") for key, _, id_ in receipts}, ends)

    def test_a_retry_in_mid_call_waits_and_replays(self) -> None:
        """A retry that arrives in mid-transaction waits, and gives the same answer."""
        first, retry = self.held("COMMIT"), self.held("BEGIN IMMEDIATE")
        retry.stdin.close()  # it goes for the lock, which the first call has
        self.assertEqual((end(first), end(retry)), (JOB_1, JOB_1))
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_an_empty_read_is_no_proof(self) -> None:
        """No job is seen while the call is in flight; a moment later it is there."""
        first = self.held("COMMIT")  # both rows are inserted by now
        self.assertEqual(self.rows(self.database), EMPTY)
        self.assertEqual(end(first), JOB_1)
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_a_call_that_is_locked_out_has_not_looked(self) -> None:
        """A call that can't get the lock has read nothing: it locks before it looks."""
        ran = []
        connect = sqlite3.connect

        def impatient(*arguments: object, **options: object) -> sqlite3.Connection:
            return connect(*arguments, **{**options, "timeout": 0})

        with closing(connect(self.database, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            locked = self.assertRaisesRegex(sqlite3.OperationalError, "locked")
            hasty = mock.patch("sqlite3.connect", impatient)
            with hasty, watched(ran.append), locked:
                retry_lab.create_job(self.database, "op-a", "weekly")
        self.assertEqual(ran, ["BEGIN IMMEDIATE", "close"])
        self.assertEqual(self.rows(self.database), EMPTY)

    def test_a_wait_that_is_over_first_is_no_answer(self) -> None:
        """A retry whose wait is in vain writes nothing; the one after it replays."""
        hasty = self.edited_lab(("timeout=5", "timeout=0"))  # and no time to wait
        first = self.held("COMMIT")
        self.assertEqual(self.call(self.database, "op-a", lab=hasty), self.locked)
        self.assertEqual(self.rows(self.database), EMPTY)
        self.assertEqual(end(first), JOB_1)
        self.assertEqual(self.call(self.database, "op-a"), JOB_1)
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_plain_begin_answers_with_an_error_and_no_replay(self) -> None:
        """With a plain BEGIN one of two overlapping calls is locked out, and no replay.

        Both have looked before either has written. In rollback mode the second can't
        COMMIT while the first may still read. In WAL mode it can, and the first can't
        write any more, for what it read is out of date. The primary key isn't asked.
        """
        edits = [("BEGIN IMMEDIATE", "BEGIN"), ("timeout=5", "timeout=0")]
        lab = self.edited_lab(*edits)
        first = self.held("INSERT INTO jobs", lab=lab)
        second = self.held("COMMIT", lab=lab)
        ends = [end(second), end(first)]
        expected = [self.locked, JOB_1]
        if self.journal_mode == "WAL":
            expected.reverse()
        self.assertEqual(ends, expected)
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_the_primary_key_is_the_backstop(self) -> None:
        """A service that looks before it locks gets an error, and no second job.

        The rule is to lock, then look, and it gives a replay. Where the rule is broken,
        the primary key of receipts is the backstop, and the job goes with the receipt.
        """
        lock = '        db.execute("BEGIN IMMEDIATE")\n'
        look = "        if receipt is None:  # create\n"
        lab = self.edited_lab((lock, ""), (look, lock + look))
        first = self.held("BEGIN IMMEDIATE", lab=lab)  # it has looked by now
        self.assertEqual(self.call(self.database, "op-a", lab=lab), JOB_1)
        error = f"error: UNIQUE constraint failed: receipts.key: {self.database!r}\n"
        self.assertEqual(end(first), (1, "", error))
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_the_schema_rejects_a_second_receipt(self) -> None:
        """No second receipt for a key, none for a job, and none without a key or job."""
        self.assertEqual(self.call(self.database, "op-a"), JOB_1)
        with closing(sqlite3.connect(self.database, isolation_level=None)) as service:
            for key, job_id, broken in (
                ("op-a", 2, "UNIQUE constraint failed: receipts.key"),
                ("op-b", 1, "UNIQUE constraint failed: receipts.job_id"),
                ("", 2, "CHECK constraint failed"),
                (None, 2, "NOT NULL constraint failed: receipts.key"),
                ("op-b", None, "NOT NULL constraint failed: receipts.job_id"),
            ):
                with self.assertRaisesRegex(sqlite3.IntegrityError, broken):
                    row = (key, "weekly", job_id)
                    service.execute("INSERT INTO receipts VALUES (?, ?, ?)", row)
            for insert in (
                "INSERT INTO receipts VALUES ('op-b', NULL, 2)",
                "INSERT INTO jobs VALUES (2, NULL)",
            ):
                with self.assertRaisesRegex(sqlite3.IntegrityError, "NULL .*report"):
                    service.execute(insert)
        self.assertEqual(self.rows(self.database), FIRST_JOB)


class InFlightInWalMode(InFlight):
    journal_mode = "WAL"


if __name__ == "__main__":
    unittest.main()
