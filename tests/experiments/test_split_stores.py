"""What if the queue and the receipts live in two databases?

Crash model: a process that really dies, by its own os._exit, killed from outside, or by
a signal inside COMMIT. The machine stays up. Then the retry, with the same key.

Found: with a transaction for each store, a death between the two parts them. Job first,
and the retry makes a second job; receipt first, and the retry answers with a job that
does not exist. With both files attached to one connection, the lab's own create_job
keeps them together, but in WAL mode a death inside COMMIT parts them as well: SQLite
promises that a transaction over attached files is atomic in a crash only where the main
database is not :memory: and the journal mode is not WAL.
https://www.sqlite.org/lang_attach.html
"""

import os
import signal
import sqlite3
from contextlib import closing

from tests.support import EMPTY, FIRST_JOB, JOB_1, ROOT, LabTest, posix, run, stop

ONLY_JOB = ([(1, "weekly")], [])
ONLY_RECEIPT = ([], [("op-a", "weekly", 1)])
LONG_KEY = "op-a".ljust(100_000, "-")  # its receipt does not fit into 64 KiB

# Edits of the lab: the receipts are in a file beside the queue, and COMMIT is deadly.
OPENED, COMMIT = "    db.row_factory", '        db.execute("COMMIT")\n'
ATTACH = '    db.execute("ATTACH ? AS store", (database + "-receipts",))\n'
DEADLY = """\
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
"""


def transact(path: str, statement: str, *values: object) -> "list[tuple]":
    """Run `statement` in a connection and a transaction of its own; return its rows."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


def create_in_turn(queue: str, job_first: bool, dies: bool) -> int:
    """Do for op-a what create_job does, in a transaction for each store."""
    receipts = f"{queue}-receipts"
    for (recorded,) in transact(receipts, "SELECT job_id FROM receipts"):
        return recorded
    # The id is chosen ahead, so that the receipt can be written first.
    ((job_id,),) = transact(queue, "SELECT count(*) + 1 FROM jobs")
    job = queue, "INSERT INTO jobs VALUES (?, 'weekly')"
    receipt = receipts, "INSERT INTO receipts VALUES ('op-a', 'weekly', ?)"
    for path, insert in (job, receipt) if job_first else (receipt, job):
        transact(path, insert, job_id)
        if dies:
            os._exit(17)
    return job_id


class TwoFiles(LabTest):
    def new_queue(self, name: str, mode: str = "DELETE") -> str:
        """Make the queue, with the lab's table of jobs, and the receipts beside it."""
        for file, other in (name, "receipts"), (f"{name}-receipts", "jobs"):
            path = self.new_database(file, pragma=f"PRAGMA journal_mode = {mode};")
            transact(path, f"DROP TABLE {other}")
        return str(self.folder / name)

    def rows(self, queue: str) -> "tuple[list[tuple], list[tuple]]":
        receipts = transact(f"{queue}-receipts", "SELECT * FROM receipts")
        return transact(queue, "SELECT * FROM jobs"), receipts

    def test_two_transactions_are_parted_by_a_death(self) -> None:
        second_job = ([(1, "weekly"), (2, "weekly")], [("op-a", "weekly", 2)])
        for job_first, left, answer, after in (
            (True, ONLY_JOB, 2, second_job),
            (False, ONLY_RECEIPT, 1, ONLY_RECEIPT),
        ):
            queue = self.new_queue(f"job first, {job_first}")
            code = f"{__name__}.create_in_turn({queue!r}, {job_first}, True)"
            died = run("-c", f"import {__name__}; {code}", cwd=ROOT)
            self.assertEqual((died.returncode, self.rows(queue)), (17, left))
            self.assertEqual(create_in_turn(queue, job_first, False), answer)
            self.assertEqual(self.rows(queue), after)

    def test_one_transaction_keeps_them_together(self) -> None:
        """All is written when it dies before COMMIT, and all is there after COMMIT."""
        lab = self.edited_lab((OPENED, ATTACH + OPENED))
        for mode in ("DELETE", "WAL"):
            queue = self.new_queue(mode, mode)
            stop(self.held("COMMIT", lab, "worker", queue, "op-a", "weekly", "none"))
            self.assertEqual(self.rows(queue), EMPTY)
            died = self.call(queue, "op-a", fault="after_commit", lab=lab)
            self.assertEqual((died, self.rows(queue)), ((18, "", ""), FIRST_JOB))
            self.assertEqual(self.call(queue, "op-a", lab=lab), JOB_1)
            self.assertEqual(self.rows(queue), FIRST_JOB)

    @posix
    def test_in_wal_mode_a_death_inside_commit_parts_them(self) -> None:
        attached, deadly = (OPENED, ATTACH + OPENED), (COMMIT, DEADLY + COMMIT)
        queue = self.new_queue("queue", "WAL")
        died = self.call(queue, LONG_KEY, lab=self.edited_lab(attached, deadly))
        self.assertEqual(died, (-signal.SIGXFSZ, "", ""))
        self.assertEqual(self.rows(queue), ONLY_JOB)
        again = self.call(queue, LONG_KEY, lab=self.edited_lab(attached))
        self.assertEqual(again, (0, "2\n", ""))
