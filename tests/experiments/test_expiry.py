"""What if the receipt, or the job, is gone by the time the caller tries again?

Crash model: a worker that really dies after COMMIT, then a purge or a delete, then the
next attempt. The time is a number handed to each call: no clock is read here.

Found: a key whose receipt was purged is as good as new, and the retry makes a second
job. After a key expires, what makes a retry safe is a rejection, by a service that can
tell an expired key from a new one. Here the key travels with the time its operation
was first sent: the caller writes both down before the first attempt and repeats both,
for the same key with another time is another operation. A rejection says that this
attempt made nothing, not whether an earlier one did. And once a job's row is deleted,
its id can become another job's.
"""

import sqlite3
import unittest
from contextlib import closing

from retry_lab import SCHEMA, create_job
from tests.support import EMPTY, FIRST_JOB, JOB_1, LabTest, edited

WINDOW = 300  # an operation may be attempted for this many seconds, the last included

# The look at the time is the rule; this is the backstop, for a call that is held up
# between that look and its transaction while a purge passes it.
BACKSTOP = """CREATE TABLE purged (up_to INTEGER NOT NULL);
INSERT INTO purged VALUES (-1);
CREATE TRIGGER backstop BEFORE INSERT ON receipts
WHEN CAST(NEW.key AS INTEGER) <= (SELECT up_to FROM purged)
BEGIN SELECT RAISE(ABORT, 'its receipt may have been purged'); END;"""


class OutsideWindow(ValueError):
    """The operation was first sent too long ago, or in the future."""


def create_job_within(
    database: str, key: str, report: str, first_sent: int, now: int
) -> int:
    """Return the id of the operation's job; outside the window, reject."""
    # A published API that rejects an expired key, with 412, as potentially unsafe:
    # https://learn.microsoft.com/rest/api/communication/repeatable-requests
    if not now - WINDOW <= first_sent <= now:
        raise OutsideWindow(f"first sent at {first_sent}, and now it is {now}")
    return create_job(database, f"{first_sent} {key}", report)


def purge(database: str, now: int) -> None:
    """Delete the receipts of operations past the window, in one transaction."""
    expired = (now - WINDOW - 1,)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE purged SET up_to = max(up_to, ?)", expired)
        # CAST reads the number in front: "1000 op-a" is 1000.
        query = "DELETE FROM receipts WHERE CAST(key AS INTEGER) <= ?"
        connection.execute(query, expired)


def change(database: str, statements: str) -> None:
    """Run `statements` as somebody with a connection of their own would."""
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(statements)


class ExpiredKey(LabTest):
    def setUp(self) -> None:
        super().setUp()
        self.path = self.new_database()
        change(self.path, BACKSTOP)

    def attempt(self, first_sent: int, now: int) -> object:
        """Attempt op-a; return the job's id, or the class of the rejection."""
        try:
            return create_job_within(self.path, "op-a", "weekly", first_sent, now)
        except (OutsideWindow, sqlite3.IntegrityError) as rejection:
            return type(rejection)

    def test_a_purged_key_makes_a_second_job(self) -> None:
        """Once its receipt is purged, the same key makes a second job."""
        path = self.new_database("plain.sqlite")
        self.assertEqual(self.call(path, "op-a", fault="after_commit"), (18, "", ""))
        self.assertEqual(self.rows(path), FIRST_JOB)
        change(path, "DELETE FROM receipts")
        self.assertEqual(self.call(path, "op-a"), (0, "2\n", ""))
        two = [(1, "weekly"), (2, "weekly")]
        self.assertEqual(self.rows(path), (two, [("op-a", "weekly", 2)]))

    def test_a_key_never_carried_out_is_rejected_outside_its_window(self) -> None:
        """Past its window, or from the future, a key with no receipt makes nothing."""
        for now in (999, 1301):
            self.assertEqual(self.attempt(1000, now), OutsideWindow)
        self.assertEqual(self.rows(self.path), EMPTY)
        self.assertEqual(self.attempt(1000, 1300), 1)
        receipts = [("1000 op-a", "weekly", 1)]
        self.assertEqual(self.rows(self.path), ([(1, "weekly")], receipts))

    def test_purge_and_window_leave_no_gap(self) -> None:
        """At every age the receipt is still there or the key is rejected."""
        times = (1300, 1002, 1001, 1000, 999, 998)  # at 1300, 1000 is just in time
        made = [self.attempt(time, time) for time in times]
        self.assertEqual(made, [1, 2, 3, 4, 5, 6])
        answers = [1, 2, 3, 4, OutsideWindow, OutsideWindow]
        self.assertEqual([self.attempt(time, 1300) for time in times], answers)
        purge(self.path, 1300)
        self.assertEqual([self.attempt(time, 1300) for time in times], answers)
        jobs = [(number, "weekly") for number in made]
        kept = [(f"{times[n]} op-a", "weekly", n + 1) for n in range(4)]
        self.assertEqual(self.rows(self.path), (jobs, kept))

    def test_a_call_that_a_purge_overtook_makes_nothing(self) -> None:
        """A call let in just in time, then overtaken by a purge, makes no job."""
        self.assertEqual(self.attempt(1000, 1000), 1)
        purge(self.path, 1301)
        purge(self.path, 900)  # by a clock that is behind: nothing is let in again
        self.assertEqual(self.attempt(1000, 1300), sqlite3.IntegrityError)
        self.assertEqual(self.rows(self.path), ([(1, "weekly")], []))
        change(self.path, "DROP TRIGGER backstop")  # and without it:
        self.assertEqual(self.attempt(1000, 1300), 2)
        jobs, receipts = [(1, "weekly"), (2, "weekly")], [("1000 op-a", "weekly", 2)]
        self.assertEqual(self.rows(self.path), (jobs, receipts))


class DeletedJob(LabTest):
    def job_1_deleted(self, *edits: "tuple[str, str]") -> str:
        """Make op-a's job under the schema with `edits`, and delete the job's row."""
        path = self.new_database(schema=edited(SCHEMA, *edits))
        self.assertEqual(self.call(path, "op-a"), JOB_1)
        change(path, "DELETE FROM jobs")
        self.assertEqual(self.rows(path), ([], [("op-a", "weekly", 1)]))
        return path

    def test_without_unique_an_old_receipt_answers_for_another_job(self) -> None:
        """Without UNIQUE on receipts.job_id, a replay answers with another's job."""
        path = self.job_1_deleted((" UNIQUE", ""))
        self.assertEqual(self.call(path, "op-b", "daily"), JOB_1)
        self.assertEqual(self.call(path, "op-a"), JOB_1)
        jobs, receipts = self.rows(path)
        mixed_up = [("op-a", "weekly", 1), ("op-b", "daily", 1)]
        self.assertEqual((jobs, sorted(receipts)), ([(1, "daily")], mixed_up))

    def test_unique_makes_the_mix_up_an_error_while_the_receipt_stands(self) -> None:
        """In the lab's schema a reused id is an error until the old receipt is gone."""
        path = self.job_1_deleted()
        broken = f"error: UNIQUE constraint failed: receipts.job_id: {path!r}\n"
        self.assertEqual(self.call(path, "op-b", "daily"), (1, "", broken))
        # The replay still answers, with a job that is no longer there.
        self.assertEqual(self.call(path, "op-a"), JOB_1)
        self.assertEqual(self.rows(path), ([], [("op-a", "weekly", 1)]))
        change(path, "DELETE FROM receipts")
        # Whoever was told "job 1" for op-a now holds the id of op-b's job.
        self.assertEqual(self.call(path, "op-b", "daily"), JOB_1)
        self.assertEqual(self.rows(path), ([(1, "daily")], [("op-b", "daily", 1)]))

    def test_foreign_keys_keep_a_job_that_has_a_receipt(self) -> None:
        """With foreign keys on in the connection that deletes, the job stays."""
        path = self.new_database()
        self.assertEqual(self.call(path, "op-a"), JOB_1)
        with self.assertRaisesRegex(sqlite3.IntegrityError, "FOREIGN KEY"):
            change(path, "PRAGMA foreign_keys = ON; DELETE FROM jobs")
        self.assertEqual(self.rows(path), FIRST_JOB)

    def test_autoincrement_never_gives_an_id_out_again(self) -> None:
        """With AUTOINCREMENT an old receipt never answers for another's job."""
        column = "INTEGER PRIMARY KEY"
        path = self.job_1_deleted((column, f"{column} AUTOINCREMENT"))
        self.assertEqual(self.call(path, "op-b", "daily"), (0, "2\n", ""))
        self.assertEqual(self.call(path, "op-a"), JOB_1)
        receipts = [("op-a", "weekly", 1), ("op-b", "daily", 2)]
        self.assertEqual(self.rows(path), ([(2, "daily")], receipts))


if __name__ == "__main__":
    unittest.main()
