"""Does create_job keep its promises, wherever it dies and whatever else is going on?

Crash model: a worker process ends at once, by its own os._exit or killed from outside,
before any of its statements. Nobody cleans up, and the machine lives on. Other workers
may be stopped in mid-transaction meanwhile, and go on when the test lets them.
Death inside a statement is left to https://www.sqlite.org/atomiccommit.html

Found: whatever came before, the next call's exit status, answer and rows are what the
rules say. A key has one job and one receipt. A dead worker's lock dies with it, and what
it leaves on the disk harms none. A call that finds another one under way waits for it,
and then replays. If its wait ends first, that is an error and no answer.
"""

import contextlib
import itertools
import shutil
import sqlite3
import tempfile
import unittest
from contextlib import closing
from itertools import repeat
from pathlib import Path
from subprocess import Popen
from unittest import mock

from retry_lab import KeyPayloadConflict, create_job
from tests.support import (
    EMPTY,
    FIRST_JOB,
    JOB_1,
    LAB,
    REJECTED,
    LabTest,
    end,
    side_by_side,
    stop,
)
from tests.watch import held_command, watched


def rules(made: list, key: str, report: str, fault: str) -> tuple:
    """Return how a call must end: (exit status, stdout), and what is made after it.

    `made` lists a (key, report) for each job, in the order in which jobs were made.
    """
    recorded = dict(made)
    if recorded.get(key, report) != report:  # even if the worker was told to die
        return (20, "key_payload_conflict\n"), made
    after = made if key in recorded else [*made, (key, report)]
    if fault == "before_commit":
        return (17, ""), made
    if fault == "after_commit":
        return (18, ""), after
    return (0, f"{after.index((key, report)) + 1}\n"), after


def rows_of(made: list) -> "tuple[list[tuple], list[tuple]]":
    """Return the rows that jobs and receipts must have when `made` is made."""
    jobs = [(number, report) for number, (_, report) in enumerate(made, 1)]
    return jobs, [(key, report, number) for number, (key, report) in enumerate(made, 1)]


FAULTS = ("none", "before_commit", "after_commit")
CALLS = list(itertools.product(("op-a", "op-b"), ("weekly", "daily"), FAULTS))


class Histories(LabTest):
    """Calls one after the other: none overlap."""

    def make(self, left: "dict[str, bytes]", call: tuple) -> tuple:
        """Make `call` where the files `left` lie; return what is seen, and left then."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for name, content in left.items():
            (folder / name).write_bytes(content)
        database = str(folder / "service.sqlite")
        seen = self.call(database, *call)
        left = {path.name: path.read_bytes() for path in folder.iterdir()}
        return seen, self.rows(database), left

    def test_every_history_of_calls_follows_the_rules(self) -> None:
        """Each of 12 calls, after whatever 12 such calls can leave, however many.

        Histories that leave the same files have the same future: it is tried once. A
        journal counts as one file like another, for the number it starts with is random.
        """
        path = Path(self.new_database())
        reached = [([], {path.name: path.read_bytes()})]
        known = {(path.read_bytes(), 1)}
        for made, left in reached:  # which grows meanwhile
            outcomes = side_by_side(self.make, repeat(left), CALLS)
            for call, (seen, rows, left_then) in zip(CALLS, outcomes):
                ends, after = rules(made, *call)
                self.assertEqual((seen, rows), ((*ends, ""), rows_of(after)), call)
                files = left_then[path.name], len(left_then)
                if files not in known:
                    known.add(files)
                    reached.append((after, left_then))
            self.assertLess(len(reached), 19, "a call leaves ever new files")
        # No job, one of four, or two of eight; and a dead worker's journal with less
        # than two, since then each key is taken and nothing more is written.
        self.assertEqual(len(reached), 13 + 5)


class CrashPoints(LabTest):
    """A call is killed from outside before one of its steps, or dies where it is told."""

    def killed(self, step: str, database: str, report: str) -> tuple:
        """Kill a call of op-a before `step`; return how the next calls end, and rows."""
        stop(self.held(step, LAB, "worker", database, "op-a", report, "none"))
        # No look at the rows yet: the next call must manage without any help.
        ends = self.call(database, "op-a", report), self.call(database, "op-a")
        return (*ends, self.rows(database))

    def test_a_call_may_be_killed_anywhere(self) -> None:
        """The same call again is answered, and its key has one job and one receipt."""
        for name, made, report, words, answer in (
            ("create", [], "weekly", "BEGIN SELECT INSERT INSERT COMMIT close", JOB_1),
            ("replay", ["op-a"], "weekly", "BEGIN SELECT COMMIT close", JOB_1),
            ("reject", ["op-a"], "daily", "BEGIN SELECT close", REJECTED),
        ):
            path = self.new_database(name)
            for key in made:
                create_job(path, key, "weekly")
            steps = []
            with watched(steps.append), contextlib.suppress(KeyPayloadConflict):
                create_job(shutil.copy(path, f"{path}-watched"), "op-a", report)
            self.assertEqual(" ".join(step.split()[0] for step in steps), words)
            copies = [shutil.copy(path, f"{path}-{n}") for n in range(len(steps))]
            outcomes = side_by_side(self.killed, steps, copies, repeat(report))
            for step, outcome in zip(steps, outcomes):
                with self.subTest(name, killed_before=step):
                    self.assertEqual(outcome, (answer, JOB_1, FIRST_JOB))

    def test_a_fault_is_a_death_and_runs_no_finally(self) -> None:
        for fault, status, rows in (
            ("before_commit", 17, EMPTY),
            ("after_commit", 18, FIRST_JOB),
        ):
            database = self.new_database(fault)
            call = ("worker", database, "op-a", "weekly", fault)
            # Did it come to close its connection, stderr would say so.
            ends = end(self.start(*held_command("close", LAB, *call)))
            self.assertEqual((ends, self.rows(database)), ((status, "", ""), rows))


class InFlight(LabTest):
    """Nobody dies, and calls overlap just as each test says."""

    journal_mode = "DELETE"  # SQLite's own choice, a rollback journal

    def setUp(self) -> None:
        super().setUp()
        mode = f"PRAGMA journal_mode = {self.journal_mode};"
        self.database = self.new_database(pragma=mode)

    def held_at(self, place: str, key: str = "op-a", lab: Path = LAB) -> "Popen[str]":
        return self.held(place, lab, "worker", self.database, key, "weekly", "none")

    def test_racing_calls_make_a_job_for_each_key(self) -> None:
        """Eight at once, for each of four keys two: both get the id of its one job."""
        keys = [f"op-{number % 4}" for number in range(8)]
        workers = [self.held_at("BEGIN IMMEDIATE", key) for key in keys]
        for process in workers:
            process.stdin.close()
        ends = [end(process) for process in workers]
        jobs, receipts = self.rows(self.database)
        self.assertEqual(jobs, [(number, "weekly") for number in (1, 2, 3, 4)])
        self.assertEqual([job_id for _, _, job_id in receipts], [1, 2, 3, 4])
        answers = {key: (0, f"{job_id}\n", "") for key, _, job_id in receipts}
        self.assertEqual(ends, [answers.get(key) for key in keys])

    def test_a_retry_in_mid_call_waits_and_replays(self) -> None:
        """A look meanwhile finds no job, which proves nothing: a moment later it is."""
        first, retry = self.held_at("COMMIT"), self.held_at("BEGIN IMMEDIATE")
        retry.stdin.close()  # it goes for the lock, which the first call has
        self.assertEqual(self.rows(self.database), EMPTY)
        self.assertEqual((end(first), end(retry)), (JOB_1, JOB_1))
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_a_wait_that_is_over_first_is_no_answer(self) -> None:
        """After five seconds without the lock a call has not looked, nor written."""
        connect, waits, steps = sqlite3.connect, [], []

        def hasty(*arguments: object, timeout: float = 5, **options: object) -> object:
            waits.append(timeout)  # which this test does not take
            return connect(*arguments, timeout=0, **options)

        first = self.held_at("COMMIT")
        locked = self.assertRaisesRegex(sqlite3.OperationalError, "locked")
        with mock.patch("sqlite3.connect", hasty), watched(steps.append), locked:
            create_job(self.database, "op-a", "weekly")
        self.assertEqual((waits, steps), ([5], ["BEGIN IMMEDIATE", "close"]))
        self.assertEqual(self.rows(self.database), EMPTY)
        self.assertEqual(end(first), JOB_1)
        self.assertEqual(create_job(self.database, "op-a", "weekly"), 1)
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_plain_begin_answers_with_an_error_and_no_replay(self) -> None:
        """Both have looked before either has written, and the primary key isn't asked.

        In rollback mode the second can't COMMIT while the first may still read. In WAL
        mode it can, and the first can't write any more: what it read is out of date.
        """
        lab = self.edited_lab(("BEGIN IMMEDIATE", "BEGIN"), ("timeout=5", "timeout=0"))
        first, second = (
            self.held_at(p, lab=lab) for p in ("INSERT INTO jobs", "COMMIT")
        )
        ends = [end(second), end(first)]
        if self.journal_mode == "WAL":
            ends.reverse()
        error = f"error: database is locked: {self.database!r}\n"
        self.assertEqual(ends, [(1, "", error), JOB_1])
        self.assertEqual(self.rows(self.database), FIRST_JOB)


class InFlightInWalMode(InFlight):
    journal_mode = "WAL"


class Records(LabTest):
    """What is on record stays, and what makes no sense never gets there."""

    def setUp(self) -> None:
        super().setUp()
        self.database = self.new_database()

    def execute(self, statement: str, *values: object) -> None:
        """Write to the database as another program would."""
        with closing(sqlite3.connect(self.database, isolation_level=None)) as other:
            other.execute(statement, values)

    def test_a_deleted_job_has_its_receipt_and_its_id_for_ever(self) -> None:
        self.assertEqual(create_job(self.database, "op-a", "weekly"), 1)
        self.execute("DELETE FROM jobs")
        self.assertEqual(create_job(self.database, "op-b", "daily"), 2)
        self.assertEqual(create_job(self.database, "op-a", "weekly"), 1)
        receipts = [("op-a", "weekly", 1), ("op-b", "daily", 2)]
        self.assertEqual(self.rows(self.database), ([(2, "daily")], receipts))

    def test_what_is_no_text_is_rejected(self) -> None:
        """SQLite would store 5 as '5', and the identical retry would be a conflict."""
        for value in (5, None, b"x", 2.5):
            for request in ((value, "weekly"), ("op-a", value)):
                with self.subTest(request), self.assertRaises(TypeError):
                    create_job(self.database, *request)
        self.assertEqual(self.rows(self.database), EMPTY)

    def test_the_schema_rejects_what_create_job_never_writes(self) -> None:
        create_job(self.database, "op-a", "weekly")
        for row, broken in (
            (("op-a", "weekly", 2), "UNIQUE constraint failed: receipts.key"),
            (("op-b", "weekly", 1), "UNIQUE constraint failed: receipts.job_id"),
            (("", "weekly", 2), "CHECK constraint failed"),
            ((None, "weekly", 2), "NOT NULL constraint failed: receipts.key"),
            (("op-b", None, 2), "NOT NULL constraint failed: receipts.report"),
            (("op-b", "weekly", None), "NOT NULL constraint failed: receipts.job_id"),
        ):
            with self.assertRaisesRegex(sqlite3.IntegrityError, broken):
                self.execute("INSERT INTO receipts VALUES (?, ?, ?)", *row)
        with self.assertRaisesRegex(sqlite3.IntegrityError, "NOT NULL .* jobs.report"):
            self.execute("INSERT INTO jobs (report) VALUES (NULL)")
        self.assertEqual(self.rows(self.database), FIRST_JOB)

    def test_the_connection_is_closed_in_every_path(self) -> None:
        for key, report, error in (
            ("op-a", "weekly", None),
            ("op-a", "weekly", None),  # a replay
            ("op-a", "daily", KeyPayloadConflict),
            ("\udcff", "weekly", UnicodeEncodeError),
        ):
            steps = []
            raises = self.assertRaises(error) if error else contextlib.nullcontext()
            with watched(steps.append), raises:
                create_job(self.database, key, report)
            self.assertEqual(steps[-1], "close", (key, report))
        self.assertEqual(self.rows(self.database), FIRST_JOB)


if __name__ == "__main__":
    unittest.main()
