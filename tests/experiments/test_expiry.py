"""What if the receipt is gone by the time the caller tries again?

Crash model: a worker that really dies after COMMIT, then a purge, then the next attempt.
The time is a number handed to each call: no clock is read here.

Found: a key whose receipt was purged is as good as new, and the retry makes a second
job. After a key expires, what makes a retry safe is a rejection, by a service that can
tell an expired key from a new one. Here the key travels with the time its operation
was first sent: the caller writes both down before the first attempt and repeats both,
for the same key with another time is another operation. A rejection says that this
attempt made nothing, not whether an earlier one did.
"""

import sqlite3
import unittest
from contextlib import closing

from retry_lab import SCHEMA, create_job
from tests.support import EMPTY, FIRST_JOB, LabTest

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
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("UPDATE purged SET up_to = max(up_to, ?)", expired)
        # CAST reads the number in front: "1000 op-a" is 1000.
        db.execute("DELETE FROM receipts WHERE CAST(key AS INTEGER) <= ?", expired)


class ExpiredKey(LabTest):
    def setUp(self) -> None:
        super().setUp()
        self.path = self.new_database(schema=SCHEMA + BACKSTOP)

    def change(self, statements: str) -> None:
        with closing(sqlite3.connect(self.path)) as somebody:
            somebody.executescript(statements)

    def attempt(self, first_sent: int, now: int) -> object:
        """Attempt op-a; return the job's id, or the class of the rejection."""
        try:
            return create_job_within(self.path, "op-a", "weekly", first_sent, now)
        except (OutsideWindow, sqlite3.IntegrityError) as rejection:
            return type(rejection)

    def test_a_purged_key_makes_a_second_job(self) -> None:
        self.change("DROP TRIGGER backstop")
        died = self.call(self.path, "op-a", fault="after_commit")
        self.assertEqual((died, self.rows(self.path)), ((18, "", ""), FIRST_JOB))
        self.change("DELETE FROM receipts")
        self.assertEqual(self.call(self.path, "op-a"), (0, "2\n", ""))
        rows = [(1, "weekly"), (2, "weekly")], [("op-a", "weekly", 2)]
        self.assertEqual(self.rows(self.path), rows)

    def test_purge_and_window_leave_no_gap(self) -> None:
        """At every age the receipt is still there, or the key is rejected."""
        times = (1300, 1002, 1001, 1000, 999, 998)  # at 1300, 1000 is just in time
        self.assertEqual([self.attempt(t, t) for t in times], [1, 2, 3, 4, 5, 6])
        answers = [1, 2, 3, 4, OutsideWindow, OutsideWindow]
        self.assertEqual([self.attempt(time, 1300) for time in times], answers)
        purge(self.path, 1300)
        self.assertEqual([self.attempt(time, 1300) for time in times], answers)
        jobs = [(number, "weekly") for number in range(1, 7)]
        kept = [(f"{times[n]} op-a", "weekly", n + 1) for n in range(4)]
        self.assertEqual(self.rows(self.path), (jobs, kept))

    def test_a_key_never_carried_out_is_rejected_outside_its_window(self) -> None:
        too_early, too_late = self.attempt(1000, 999), self.attempt(1000, 1301)
        self.assertEqual([too_early, too_late], [OutsideWindow] * 2)
        self.assertEqual(self.rows(self.path), EMPTY)
        self.assertEqual(self.attempt(1000, 1300), 1)

    def test_a_call_that_a_purge_overtook_makes_nothing(self) -> None:
        self.assertEqual(self.attempt(1000, 1000), 1)
        purge(self.path, 1301)
        purge(self.path, 900)  # by a clock that is behind: nothing is let in again
        self.assertEqual(self.attempt(1000, 1300), sqlite3.IntegrityError)
        self.assertEqual(self.rows(self.path), ([(1, "weekly")], []))
        self.change("DROP TRIGGER backstop")  # and without it:
        self.assertEqual(self.attempt(1000, 1300), 2)


if __name__ == "__main__":
    unittest.main()
