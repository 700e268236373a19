# SPDX-License-Identifier: MIT-0
"""A tool call that creates a job got no answer: was the job created?

A worker process creates a job and a receipt in one transaction. In four of
five cases it really dies (os._exit), before or after COMMIT, and its caller
hears nothing. Then comes the caller's next attempt.

Start reading at create_job: it is the lesson. The rest calls it in worker
processes, compares what was seen with what must come of it, and prints it.

operation      one thing somebody wants done once: this week's report job
operation key  its name, minted by the caller before the first attempt and
               sent with each: 'op-a'. Most APIs call it idempotency key.
request        what the operation asks for, here just a report: 'weekly'
attempt        one call that tries to carry an operation out: one worker
job            the effect, a row of jobs: (1, 'weekly')
receipt        the service's record that a key was carried out, a row of
               receipts: ('op-a', 'weekly', 1)
answer         what reaches the caller, the worker's line on stdout: '1'
replay         a known key, the same request: answered from its receipt
conflict       a known key, another request: rejected
"""

import os
import sqlite3
import sys
from collections import namedtuple

# What only the parent needs is imported where the parent uses it: ten workers
# start in a run, and each would wait for modules that it never uses.

FAULTS = ("none", "before_commit", "after_commit")
SCHEMA = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,
    report TEXT NOT NULL
);
CREATE TABLE receipts (
    key TEXT NOT NULL PRIMARY KEY CHECK (key <> ''),
    report TEXT NOT NULL,  -- as requested; the job may change later
    -- SQLite checks REFERENCES only if PRAGMA foreign_keys is on.
    job_id INTEGER NOT NULL UNIQUE REFERENCES jobs (id)
);
"""


class KeyPayloadConflict(ValueError):
    """The operation key is on record for another report."""


def create_job(
    database: str, key: str, report: str, fault: str = "none"
) -> int:
    """Create the job of operation `key`, once, and return its id.

    `database` is the path of a SQLite file, and `fault`, one of FAULTS,
    is where to die. Raises KeyPayloadConflict for a key on record with
    another report, OSError for a missing file, and sqlite3.Error for a
    file without SCHEMA or one that stays locked for five seconds.
    """
    os.stat(database)  # sqlite3.connect would create a missing file
    # isolation_level=None: Python begins no transaction by itself, so
    # the one below begins and ends where it says.
    db = sqlite3.connect(database, timeout=5, isolation_level=None)
    db.row_factory = sqlite3.Row  # a row's columns have names
    try:
        # Lock, then look. A second caller waits here until the first
        # has committed or died, and then sees the receipt it left.
        # https://www.sqlite.org/lang_transaction.html
        db.execute("BEGIN IMMEDIATE")
        receipt = db.execute(
            "SELECT report, job_id FROM receipts WHERE key = ?", (key,)
        ).fetchone()

        if receipt is None:  # create
            job_id = db.execute(
                "INSERT INTO jobs (report) VALUES (?)", (report,)
            ).lastrowid
            db.execute(
                "INSERT INTO receipts VALUES (?, ?, ?)",
                (key, report, job_id),
            )
        elif receipt["report"] == report:  # replay
            job_id = receipt["job_id"]
        else:  # reject
            raise KeyPayloadConflict(
                f"{key!r} is on record for {receipt['report']!r}"
            )

        if fault == "before_commit":
            # No finally, no flush, no rollback runs. The next caller
            # finds no row all the same: nothing was committed.
            os._exit(17)
        db.execute("COMMIT")
        if fault == "after_commit":
            os._exit(18)
        return job_id
    finally:
        db.close()  # what is not committed by now is rolled back


# Where this text is pasted at a prompt, __file__ is missing or another file.
THIS_FILE = create_job.__code__.co_filename
PROGRAM = "worker.pyc"  # this file, compiled for the workers


def worker(arguments: list[str]) -> int:
    """Make one attempt, print its answer, and return the exit status."""
    if len(arguments) != 4 or not arguments[1] or arguments[3] not in FAULTS:
        call = f"worker DATABASE KEY REPORT {'|'.join(FAULTS)} (KEY: not empty)"
        print(f"usage: {os.path.basename(THIS_FILE)} {call}", file=sys.stderr)
        return 2
    database, key, report, fault = arguments
    try:
        job_id = create_job(database, key, report, fault)
    except KeyPayloadConflict:
        print("key_payload_conflict", flush=True)
        return 20
    except sqlite3.Error as error:
        raise sqlite3.Error(f"{error}: {database!r}") from error
    if not isinstance(job_id, int):  # SQLite takes any type in any column
        raise sqlite3.Error(f"no number as job id: {job_id!r} in {database!r}")
    print(job_id, flush=True)
    return 0


# One call: what is called, and what comes of it. jobs and receipts are all the
# rows of their tables after the call. What is expected and what is seen are of
# this one type, so that the judge compares like with like.
Call = namedtuple("Call", "key report fault exit stdout stderr jobs receipts")

REJECTED = "key_payload_conflict\n"
ONE_JOB = [(1, "weekly")]
TWO_JOBS = [(1, "weekly"), (2, "weekly")]
OP_A = [("op-a", "weekly", 1)]
BOTH = [("op-a", "weekly", 1), ("op-b", "weekly", 2)]

# A case is two calls: the first call, then the next attempt.
# fmt: off
CASES = [
    # 1: Nothing was committed. The same key creates the job.
    #     key     report    fault         exit  stdout   stderr  jobs  receipts
    [Call("op-a", "weekly", "before_commit", 17, "",       "", [],       []),
     Call("op-a", "weekly", "none",           0, "1\n",    "", ONE_JOB,  OP_A)],

    # 2: The job was committed. The same key is answered from the receipt.
    [Call("op-a", "weekly", "after_commit",  18, "",       "", ONE_JOB,  OP_A),
     Call("op-a", "weekly", "none",           0, "1\n",    "", ONE_JOB,  OP_A)],

    # 3: The same silence, but the retry has a new key: a duplicate.
    [Call("op-a", "weekly", "after_commit",  18, "",       "", ONE_JOB,  OP_A),
     Call("op-b", "weekly", "none",           0, "2\n",    "", TWO_JOBS, BOTH)],

    # 4: The same key with another report is rejected.
    [Call("op-a", "weekly", "after_commit",  18, "",       "", ONE_JOB,  OP_A),
     Call("op-a", "daily",  "none",          20, REJECTED, "", ONE_JOB,  OP_A)],

    # 5: Two operations, both wanted, with a key each: no duplicate.
    [Call("op-a", "weekly", "none",           0, "1\n",    "", ONE_JOB,  OP_A),
     Call("op-b", "weekly", "none",           0, "2\n",    "", TWO_JOBS, BOTH)],
]
# fmt: on


def observe(number: int, case: list[Call], directory: str) -> list[Call]:
    """Make both calls of a case on a new database; return what was seen."""
    program = os.path.join(directory, PROGRAM)
    database = os.path.join(directory, f"case-{number}.sqlite")
    db = sqlite3.connect(database)
    try:
        db.executescript(SCHEMA)
        # The next attempt is made whatever the first call's exit status was:
        # a caller doesn't see it, and can't tell before COMMIT from after.
        return [make_call(program, database, db, call) for call in case]
    except sqlite3.Error as error:
        raise sqlite3.Error(f"{error}: {database!r}") from error
    finally:
        db.close()


def make_call(
    program: str, database: str, db: sqlite3.Connection, call: Call
) -> Call:
    """Run a worker, for ten seconds at most; return what was seen of it."""
    import subprocess

    request = [database, call.key, call.report, call.fault]
    # For a fast start: -I reads no PYTHON* variable, -S finds no site package.
    command = [sys.executable, "-I", "-S", program, "worker", *request]
    status: object
    try:
        ended = subprocess.run(
            command,
            check=False,
            capture_output=True,
            encoding="latin-1",  # which has a letter for every byte
            timeout=10,
        )
        status, stdout, stderr = ended.returncode, ended.stdout, ended.stderr
    except subprocess.TimeoutExpired:
        status, stdout, stderr = "hung", "", ""
    jobs = db.execute("SELECT * FROM jobs ORDER BY id").fetchall()
    receipts = db.execute("SELECT * FROM receipts ORDER BY key").fetchall()
    return call._replace(
        exit=status, stdout=stdout, stderr=stderr, jobs=jobs, receipts=receipts
    )


def judge(number: int, case: list[Call], seen: list[Call]) -> list[str]:
    """Return a complaint for each field seen that is not as expected.

    A case is void if a worker did not die where it was told to: what came
    after that proves nothing.
    """
    complaints = []
    names = ("first call", "next attempt")
    for name, expected, saw in zip(names, case, seen):
        title = f"case {number}: {name}"
        if expected.fault != "none" and expected.exit != saw.exit:
            return compare(f"VOID {title}", ("exit", "stderr"), expected, saw)
        complaints += compare(f"FAIL {title}", Call._fields, expected, saw)
    return complaints


def compare(
    title: str, fields: tuple[str, ...], expected: Call, saw: Call
) -> list[str]:
    """Return a complaint for each of `fields` in which two calls differ."""
    complaints = []
    for field in fields:
        wanted, found = getattr(expected, field), getattr(saw, field)
        if wanted == found:
            continue
        if field == "stderr":  # of a traceback, the last line is the reason
            found = found.rstrip().rpartition("\n")[2]
        line = f"{title}: {field}\n  expected {wanted!a}\n  saw      {found!a}"
        complaints.append(line)
    return complaints


TABLE = """\
| # | First call    | Next attempt           | Exits    | Jobs   | Answer   |
|---|---------------|------------------------|----------|--------|----------|"""
ROW = "| {} | {:13} | {:22} | {:8} | {:6} | {:8} |"


def table(observations: list[list[Call]]) -> str:
    """Return what was seen, and nothing else, as a Markdown table."""
    lines = [TABLE]
    deaths = {0: "no crash", 17: "before commit", 18: "after commit"}
    for number, (first, following) in enumerate(observations, 1):
        death = deaths.get(first.exit, "unclear")
        key = "same key" if following.key == first.key else "new key"
        report = "same" if following.report == first.report else "other"
        request = f"{key}, {report} report"
        exits = f"{first.exit} -> {following.exit}"
        jobs = f"{len(first.jobs)} -> {len(following.jobs)}"
        answer = "rejected" if following.exit == 20 else "unclear"
        if following.exit == 0 and following.stdout.strip().isdecimal():
            answer = f"job {following.stdout.strip()}"
        lines.append(ROW.format(number, death, request, exits, jobs, answer))
    return "\n".join(lines)


HELP = """\
A call that creates a job got no answer: five cases of trying it again.

exit status: 0 all passed; 1 a failed or void case, or an error; 2 bad usage
one attempt: %(prog)s worker DATABASE KEY REPORT FAULT
  FAULT is none, before_commit or after_commit. Its exit status is
  0 answered (job id on stdout), 17 died before COMMIT, 18 died after COMMIT,
  20 conflict (key_payload_conflict on stdout), 1 another error, 2 bad usage
example: %(prog)s --keep kept
         %(prog)s worker kept/case-2.sqlite op-a weekly none"""
PASS = """\
PASS: exit status, stdout, stderr and all rows are as expected after each call.
Cases 2 and 3 differ only in the key: same key, one job; new key, two jobs.
Cases 3 and 5 end in the same rows: afterwards nothing in the database tells an
accidental duplicate from an intended second job."""
KEPT = """
case-1.sqlite to case-5.sqlite are in {!a}. To look into one, go there and run:
python -c "import sqlite3 as s; print(*s.connect('case-3.sqlite').iterdump())"
"""


def lab(arguments: list[str]) -> int:
    """Run the cases in DIR or in a temporary one; return the exit status."""
    import shutil
    import tempfile

    set_signals()
    keep = parse(arguments) if arguments else None
    if keep is None:
        with tempfile.TemporaryDirectory() as directory:
            return run_cases(directory, "")
    os.mkdir(keep)
    try:
        return run_cases(keep, KEPT.format(keep))
    except BaseException:  # an error, not a failed case: it can be repeated
        shutil.rmtree(keep)
        raise


def set_signals() -> None:
    """Let other requests to stop end the run as Ctrl-C does, cleaned up."""
    import signal

    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP and no SIGCHLD
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, signal.default_int_handler)
    if hasattr(signal, "SIGCHLD"):
        # Where our own parent ignores it, so would we, and lose exit statuses.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def parse(arguments: list[str]) -> "str | None":
    """Return the DIR of --keep DIR, or None; bad usage ends the process."""
    import argparse

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=HELP, formatter_class=raw)
    keep_help = "make DIR, leave databases there"
    parser.add_argument("--keep", metavar="DIR", help=keep_help)
    keep: str | None = parser.parse_args(arguments).keep
    if keep is not None and os.path.lexists(keep):
        parser.error(f"--keep: {keep!a} exists")
    return keep


def run_cases(directory: str, ending: str) -> int:
    """Run the five cases, print what was seen, and return the exit status."""
    import py_compile

    # Once for all ten workers: compiling takes longer than an attempt does.
    program = os.path.join(directory, PROGRAM)
    py_compile.compile(THIS_FILE, cfile=program)
    observations, complaints = [], []
    for number, case in enumerate(CASES, 1):
        seen = observe(number, case, directory)
        observations.append(seen)
        complaints += judge(number, case, seen)
    os.remove(program)
    shown = [table(observations), "", *(complaints or [PASS]), ending]
    # In one write: a reader such as `head` may be gone before a second one.
    sys.stdout.write("\n".join(shown))
    sys.stdout.flush()
    return 1 if complaints else 0


def main(arguments: list[str]) -> int:
    """Run a worker or the lab; return the exit status. An error is one line."""
    if not os.path.isfile(THIS_FILE):
        sys.exit("error: save this as a file first: its workers run it")
    if not sys.executable:
        sys.exit("error: Python can't tell its own path, to start workers with")
    if sys.stdout is None or sys.stderr is None:  # closed by a shell's >&-
        sys.exit("error: standard output and standard error must be open")
    try:
        if arguments[:1] == ["worker"]:
            return worker(arguments[1:])
        return lab(arguments)
    except KeyboardInterrupt:
        message = "interrupted"
    except (OSError, sqlite3.Error, UnicodeEncodeError) as error:
        message = str(error)
    print(f"error: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # stdout is broken; or Python would try again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
