# SPDX-License-Identifier: MIT-0
"""A tool call that creates a job got no answer: was the job created?

A worker process creates a job, and a receipt that says for which operation key
(most APIs say idempotency key). It really dies, before or after COMMIT, and its
caller hears nothing and tries again. The same key is answered from the receipt,
or creates the job if there is none. A new key asks for another job.

usage: python retry_lab.py [--keep NEW_DIR]  (which gets the databases)
       python retry_lab.py worker DATABASE KEY REPORT FAULT
for example: python retry_lab.py worker kept/case-2.sqlite op-a weekly none

FAULT: none, before_commit or after_commit. Exit: 0 passed or answered; 1 failed
or void, or an error; 2 bad usage; 17, 18 died before, after COMMIT; 20 rejected
"""

import os
import sqlite3
import sys
from collections import namedtuple

FAULTS = ("none", "before_commit", "after_commit")
SCHEMA = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given out again
    report TEXT NOT NULL);
CREATE TABLE receipts (
    key TEXT NOT NULL PRIMARY KEY CHECK (key <> ''),
    report TEXT NOT NULL,  -- as requested; the job may change later
    -- No REFERENCES: a receipt stays when its job is deleted.
    job_id INTEGER NOT NULL UNIQUE);
"""


class KeyPayloadConflict(ValueError):
    """The operation key is on record for another report: (key, report)."""


def create_job(
    database: str, key: str, report: str, fault: str = "none"
) -> int:
    """Create the job of operation `key`, once, and return its id.

    `fault`, one of FAULTS, says where to die. Raises KeyPayloadConflict
    for a key with another report, TypeError for what is no text, and
    OSError or sqlite3.Error for a file that can't be used, or locked.
    """
    if not isinstance(key, str) or not isinstance(report, str):
        raise TypeError("key and report must be text")  # 5 is not '5'
    os.stat(database)  # sqlite3.connect would create a missing file
    # isolation_level=None: Python begins no transaction by itself.
    db = sqlite3.connect(database, timeout=5, isolation_level=None)
    db.row_factory = sqlite3.Row  # a row's columns have names
    try:
        # Lock, then look. A second caller waits here until the first
        # has committed or died, and then sees the receipt it left.
        db.execute("BEGIN IMMEDIATE")
        receipt = db.execute(
            "SELECT report, job_id FROM receipts WHERE key = ?", (key,)
        ).fetchone()

        if receipt is None:  # create
            job_id = db.execute(
                "INSERT INTO jobs (report) VALUES (?)", (report,)
            ).lastrowid
            db.execute(
                """INSERT INTO receipts (key, report, job_id)
                VALUES (?, ?, ?)""",
                (key, report, job_id),
            )
        elif receipt["report"] == report:  # replay
            job_id = receipt["job_id"]
        else:  # reject
            raise KeyPayloadConflict(key, receipt["report"])

        if fault == "before_commit":
            # No finally, no flush, no rollback runs after this.
            os._exit(17)
        db.execute("COMMIT")
        if fault == "after_commit":
            os._exit(18)
        return job_id
    finally:
        db.close()  # what is not committed by now is rolled back


def worker(database: str, key: str, report: str, fault: str) -> int:
    """Make one attempt, print its answer, and return the exit status."""
    if not key or fault not in FAULTS:
        return 2
    try:
        job_id = create_job(database, key, report, fault)
        if not isinstance(job_id, int):  # SQLite takes any type in a column
            raise sqlite3.Error(f"no number as job id: {job_id!r}")
    except KeyPayloadConflict:
        print("key_payload_conflict", flush=True)
        return 20
    except sqlite3.Error as error:
        raise sqlite3.Error(f"{error}: {database!r}") from error
    print(job_id, flush=True)
    return 0


# One call, as expected or seen, with all rows after it. Not compared: stderr.
Call = namedtuple(
    "Call", "key report fault exit stdout jobs receipts stderr", defaults=[""]
)
REJECTED = "key_payload_conflict\n"
ONE_JOB = [(1, "weekly")]
TWO_JOBS = [(1, "weekly"), (2, "weekly")]
OP_A = [("op-a", "weekly", 1)]
BOTH = [("op-a", "weekly", 1), ("op-b", "weekly", 2)]
CASES = [
    # 1: Nothing was committed. The same key creates the job.
    #     key     report    fault         exit  stdout    jobs      receipts
    [Call("op-a", "weekly", "before_commit", 17, "",       [],       []),
     Call("op-a", "weekly", "none",           0, "1\n",    ONE_JOB,  OP_A)],
    # 2: The job was committed. The same key is answered from the receipt.
    [Call("op-a", "weekly", "after_commit",  18, "",       ONE_JOB,  OP_A),
     Call("op-a", "weekly", "none",           0, "1\n",    ONE_JOB,  OP_A)],
    # 3: The same silence, but the retry has a new key: a duplicate.
    [Call("op-a", "weekly", "after_commit",  18, "",       ONE_JOB,  OP_A),
     Call("op-b", "weekly", "none",           0, "2\n",    TWO_JOBS, BOTH)],
    # 4: The same key with another report is rejected.
    [Call("op-a", "weekly", "after_commit",  18, "",       ONE_JOB,  OP_A),
     Call("op-a", "daily",  "none",          20, REJECTED, ONE_JOB,  OP_A)],
    # 5: Two operations, both wanted, with a key each: no duplicate.
    [Call("op-a", "weekly", "none",           0, "1\n",    ONE_JOB,  OP_A),
     Call("op-b", "weekly", "none",           0, "2\n",    TWO_JOBS, BOTH)],
]  # fmt: skip

# The lesson ends here. The rest makes these calls, compares, prints a table.
THIS_FILE = create_job.__code__.co_filename  # __file__ may be missing


def observe(number: int, case: list[Call], directory: str) -> list[Call]:
    """Make both calls of a case on a new database; return what was seen."""
    import subprocess  # here, or each of ten workers would wait for it too

    database = os.path.join(directory, f"case-{number}.sqlite")
    # For a fast start: -I reads no PYTHON* variable, -S finds no site package.
    lean = (sys.executable, "-I", "-S", THIS_FILE, "worker", database)
    seen = []
    db = sqlite3.connect(database)
    try:
        db.executescript(SCHEMA)
        for call in case:  # the second one, whatever came of the first
            request = (call.key, call.report, call.fault)
            command = lean + request
            ended = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=10
            )
            heard = (ended.returncode, ended.stdout)
            jobs = db.execute("SELECT * FROM jobs").fetchall()
            receipts = db.execute("SELECT * FROM receipts").fetchall()
            seen.append(Call(*request, *heard, jobs, receipts, ended.stderr))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"case {number}: a worker hung") from None
    finally:
        db.close()
    return seen


def judge(number: int, case: list[Call], seen: list[Call]) -> list[str]:
    """Return a complaint for each field that is not as expected."""
    complaints = []
    for name, expected, saw in zip(("first call", "next attempt"), case, seen):
        void = expected.fault != "none" and expected.exit != saw.exit
        title = f"{'VOID' if void else 'FAIL'} case {number}: {name}"
        said = saw.stderr.strip().splitlines() or [""]
        fatal = said[0].startswith("Fatal Python error")  # a trace follows it
        last = said[0] if fatal else said[-1]
        for field, wanted, found in zip(Call._fields[:-1], expected, saw):
            if wanted != found and (field == "exit" or not void):
                complaints.append(f"{title}: {field}\n  expected {wanted!a}")
                complaints.append(f"  saw      {found!a}\n  stderr   {last!a}")
        if void:  # it did not die as told, so the next attempt proves nothing
            break
    return complaints


TABLE = """\
| # | First call    | Next attempt           | Exits    | Jobs   | Answer   |
|---|---------------|------------------------|----------|--------|----------|"""
ROW = "| {} | {:13} | {:22} | {:8} | {:6} | {:8} |"
DEATHS = {0: "no crash", 17: "before commit", 18: "after commit"}
ANSWERS = {(0, "1\n"): "job 1", (0, "2\n"): "job 2", (20, REJECTED): "rejected"}
PASS = """\
PASS: exit status, stdout and all rows are as expected after each call.
Cases 2 and 3 differ only in the key: same key, one job; new key, two jobs.
Cases 3 and 5 end in the same rows: afterwards nothing in the database tells an
accidental duplicate from an intended second job."""
KEPT = """
case-1.sqlite to case-5.sqlite are in {!a}. To look into one, go there and run:
python -c "import sqlite3 as s; print(*s.connect('case-3.sqlite').iterdump())"\
"""
USAGE = "usage: --keep NEW_DIR, or worker DATABASE KEY REPORT FAULT; see --help"


def row(number: int, first: Call, retry: Call) -> str:
    """Return what was seen in a case, and nothing else, as a row of TABLE."""
    death = DEATHS.get(first.exit, "unclear")
    key = "same key" if retry.key == first.key else "new key"
    report = "same report" if retry.report == first.report else "other report"
    exits = f"{first.exit} -> {retry.exit}"
    jobs = f"{len(first.jobs)} -> {len(retry.jobs)}"
    answer = ANSWERS.get((retry.exit, retry.stdout), "unclear")
    return ROW.format(number, death, f"{key}, {report}", exits, jobs, answer)


def lab(keep: "str | None" = None) -> int:
    """Run the cases, print what was seen, and return the exit status."""
    import shutil
    import signal
    import tempfile

    if keep is not None and os.path.lexists(keep):
        return 2
    for name in ("SIGTERM", "SIGHUP"):  # end the run as Ctrl-C does
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, signal.default_int_handler)
    if hasattr(signal, "SIGCHLD"):  # ignored, it would hide exit statuses
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    lines, complaints = [TABLE], []
    with tempfile.TemporaryDirectory() as directory:
        for number, case in enumerate(CASES, 1):
            seen = observe(number, case, directory)
            lines.append(row(number, *seen))
            complaints += judge(number, case, seen)
        lines += ["", *(complaints or [PASS])]
        if keep is not None:
            shutil.copytree(directory, keep, copy_function=shutil.copy)
            lines.append(KEPT.format(keep))
    print(*lines, sep="\n", flush=True)
    return 1 if complaints else 0


def main(argv: list[str]) -> int:
    """Run a worker or the lab; return the exit status. An error is one line."""
    if not os.path.isfile(THIS_FILE):
        sys.exit("error: save this as a file first: its workers run it")
    status = 2
    try:
        if argv[:1] == ["worker"] and len(argv) == 5:
            status = worker(*argv[1:])
        elif not argv or (argv[0] == "--keep" and len(argv) == 2):
            status = lab(*argv[1:])
        elif argv == ["--help"]:
            print(__doc__ or "python -OO leaves the help out.", flush=True)
            status = 0
    except (KeyboardInterrupt, OSError, sqlite3.Error, ValueError) as error:
        sys.exit(f"error: {str(error) or 'interrupted'}")
    if status == 2:
        print(USAGE, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
