# SPDX-License-Identifier: MIT-0
# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
"""A call that creates a job got no answer. Did it create the job? Try again?

In each of five cases a worker process writes a job and a receipt in one transaction.
In four it really dies (os._exit), before or after COMMIT. Then comes the next attempt.
There is no network here, no power loss and no load: only processes and SQLite files.

operation       one thing somebody intends to happen once
operation key   the name of that operation, minted once by whoever intends it
attempt         one call that tries to carry the operation out: one worker process
job             the effect: a row in jobs
receipt         the service's record that a key was carried out: a row in receipts
acknowledgment  the answer that reaches the caller: the worker's line on stdout
replay          answering a repeated key from its receipt, changing nothing
conflict        a recorded key arriving with another report: refused
"""

import os
import sqlite3
import sys
from collections import namedtuple
from contextlib import closing

# The parent imports what only it needs inside its functions: ten workers start in a
# run, and each would pay for subprocess, tempfile and argparse without using them.

SCHEMA = """BEGIN; CREATE TABLE jobs (id INTEGER PRIMARY KEY, report TEXT NOT NULL);
CREATE TABLE receipts (key TEXT NOT NULL PRIMARY KEY, report TEXT NOT NULL,
                       job_id INTEGER NOT NULL UNIQUE REFERENCES jobs (id)); COMMIT;"""
FAULTS = ("none", "before_commit", "after_commit")


class KeyPayloadConflict(ValueError):
    """The operation key is on record for another report."""


def create_job(database: str, key: str, report: str, fault: str = "none") -> int:
    """Return the id of the job of operation `key`, creating it at the first attempt.

    `fault`, one of FAULTS, is where the process dies. Raises KeyPayloadConflict,
    OSError (no file), sqlite3.Error (no table, a 5 s lock), UnicodeEncodeError (key).
    """
    os.stat(database)  # sqlite3.connect would create a missing file
    connection = sqlite3.connect(database, timeout=5, isolation_level=None)
    run = connection.execute
    with closing(connection):  # in every path; it rolls back what is still open
        # Lock, then look: nobody writes between look and act, and a second caller
        # waits here until it can see the receipt. sqlite.org/lang_transaction.html
        run("BEGIN IMMEDIATE")
        query = "SELECT report, job_id FROM receipts WHERE key = ?"
        receipt = run(query, (key,)).fetchone()
        if receipt:
            recorded_report, job_id = receipt
            if recorded_report != report:
                raise KeyPayloadConflict("key_payload_conflict")
        else:
            job_id = run("INSERT INTO jobs (report) VALUES (?)", (report,)).lastrowid
            # The lock is the rule, the primary key the backstop: a service that looks
            # before it locks gets an error here for a second receipt, not a replay.
            run("INSERT INTO receipts VALUES (?, ?, ?)", (key, report, job_id))
        if fault == "before_commit":
            os._exit(17)  # no finally, no flush, no rollback, as in a real crash
        run("COMMIT")
        if fault == "after_commit":
            os._exit(18)
        return int(job_id)


def worker(arguments: list[str]) -> int:
    """Make an attempt, acknowledge it on stdout, return the process's exit status."""
    if len(arguments) != 4 or not arguments[1] or arguments[3] not in FAULTS:
        usage = f"worker DATABASE KEY REPORT {'|'.join(FAULTS)} (KEY: not empty)"
        print(f"usage: {os.path.basename(__file__)} {usage}", file=sys.stderr)
        return 2
    try:
        answer, status = str(create_job(*arguments)), 0
    except KeyPayloadConflict as conflict:
        answer, status = str(conflict), 20
    print(answer, flush=True)
    return status


# How a worker ended; what a database held; what was sent and seen; what to expect.
Reply = namedtuple("Reply", "exit_status stdout stderr")
Rows = namedtuple("Rows", "jobs receipts")
Observation = namedtuple("Observation", "key report first first_rows next next_rows")
Case = namedtuple("Case", "row fault key report first first_jobs next next_jobs keys")

# Each expectation is written out, none derived from another: that job ids equal job
# counts is a coincidence, and no check may lean on it.
BEFORE, AFTER = Reply(17, "", ""), Reply(18, "", "")
JOB_1, JOB_2 = Reply(0, "1\n", ""), Reply(0, "2\n", "")
REFUSED = Reply(20, "key_payload_conflict\n", "")
ONE, TWO = [(1, "weekly")], [(1, "weekly"), (2, "weekly")]
FIRST_CALL = ("op-a", "weekly")
CASES = (  # row, first fault, next key and report; first reply, jobs; next; keys
    Case(1, "before_commit", "op-a", "weekly", BEFORE, [], JOB_1, ONE, ["op-a"]),
    Case(2, "after_commit", "op-a", "weekly", AFTER, ONE, JOB_1, ONE, ["op-a"]),
    Case(3, "after_commit", "op-b", "weekly", AFTER, ONE, JOB_2, TWO, ["op-a", "op-b"]),
    Case(4, "after_commit", "op-a", "daily", AFTER, ONE, REFUSED, ONE, ["op-a"]),
    Case(5, "none", "op-b", "weekly", JOB_1, ONE, JOB_2, TWO, ["op-a", "op-b"]),
)


def observe(case: Case, directory: str) -> Observation:
    """Make a database in `directory` and both attempts of `case`; say what was seen."""
    database = os.path.join(directory, f"case-{case.row}.sqlite")
    seen: list[object] = []
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(SCHEMA)
        # The second call is made whatever the first exit status was: the status is the
        # lab's instrument. A caller never sees it, and can't tell before from after.
        for call in (*FIRST_CALL, case.fault), (case.key, case.report, "none"):
            seen += [call_worker(database, *call), read_rows(connection)]
    return Observation(case.key, case.report, *seen)


def call_worker(*arguments: str) -> Reply:
    """Run a worker process, for 10 seconds at most, and return how it ended."""
    import subprocess

    # -I and -S: no PYTHON* variable and no site package touches what a worker does.
    call = [sys.executable, "-I", "-S", __file__, "worker", *arguments]
    try:
        done = subprocess.run(
            call, check=False, capture_output=True, encoding="latin-1", timeout=10
        )
    except subprocess.TimeoutExpired:
        return Reply("hung", "", "")
    return Reply(done.returncode, done.stdout, done.stderr)


def read_rows(connection: sqlite3.Connection) -> Rows:
    """Return all (id, report) of jobs and all (key, report, job_id) of receipts."""
    try:
        jobs = connection.execute("SELECT id, report FROM jobs ORDER BY id").fetchall()
        receipts = connection.execute("SELECT * FROM receipts ORDER BY key").fetchall()
    except sqlite3.Error as error:  # a worker broke it: for the judge, not for us
        return Rows([], [("unreadable", str(error), 0)])
    return Rows(jobs, receipts)


def judge(case: Case, seen: Observation) -> list[str]:
    """Return a complaint for each thing in `seen` that `case` does not expect. Pure."""
    jobs, receipts = seen.next_rows
    strays = [row for row in receipts if (row[2], row[1]) not in jobs]
    keys = sorted({row[0] for row in receipts}, key=repr)
    checks = [
        ("first exit status", case.first.exit_status, seen.first.exit_status),
        ("first stdout", case.first.stdout, seen.first.stdout),
        ("first stderr", case.first.stderr, seen.first.stderr),
        ("jobs after the first call", case.first_jobs, seen.first_rows.jobs),
        ("next exit status", case.next.exit_status, seen.next.exit_status),
        ("next stdout", case.next.stdout, seen.next.stdout),
        ("next stderr", case.next.stderr, seen.next.stderr),
        ("jobs after the next attempt", case.next_jobs, jobs),
        ("number of receipts", len(jobs), len(receipts)),
        ("receipts without their job", [], strays),
        ("keys with a receipt", case.keys, keys),
    ]
    if case.next == REFUSED:
        checks.append(("rows after the conflict", seen.first_rows, seen.next_rows))
    verdict = "FAIL"
    # A next attempt means nothing if the first worker did not die as it was told to.
    if case.fault != "none" and case.first.exit_status != seen.first.exit_status:
        verdict, checks = "VOID", checks[:1]
    line = verdict + " case {}: {}: expected {!a}, saw {!a}"
    return [line.format(case.row, *check) for check in checks if check[1] != check[2]]


def judge_all(observations: list[Observation]) -> list[str]:
    """Return the complaints about each case, and about cases 3 and 5 side by side."""
    lines = [line for pair in zip(CASES, observations) for line in judge(*pair)]
    third, fifth = observations[2].next_rows, observations[4].next_rows
    if third != fifth and not any(line.startswith("VOID case 3") for line in lines):
        line = "FAIL case 5: rows as in case 3: expected {!a}, saw {!a}"
        lines.append(line.format(third, fifth))
    return lines


def table(observations: list[Observation]) -> str:
    """Return what was seen as a Markdown table; no expectation comes near it."""
    rows = [("#", "First call", "Next attempt", "Exits", "Jobs", "Answer")]
    deaths = {0: "no crash", 17: "before commit", 18: "after commit"}
    for row, seen in enumerate(observations, 1):
        death = deaths.get(seen.first.exit_status, "unclear")
        key = "same key" if seen.key == FIRST_CALL[0] else "new key"
        report = "same report" if seen.report == FIRST_CALL[1] else "other report"
        exits = f"{seen.first.exit_status} -> {seen.next.exit_status}"
        jobs = f"{len(seen.first_rows.jobs)} -> {len(seen.next_rows.jobs)}"
        job = seen.next.stdout.strip()
        answers = {0: f"job {job}" if job.isdecimal() else "unclear", 20: "rejected"}
        answer = answers.get(seen.next.exit_status, "unclear")
        rows.append((str(row), death, f"{key}, {report}", exits, jobs, answer))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


HELP = """A call that creates a job got no answer: five cases of trying it again.

exit status: 0 all passed; 1 a failed or void case, or an error; 2 bad usage
one attempt: %(prog)s worker DATABASE KEY REPORT FAULT
  where FAULT is none, before_commit or after_commit; its exit status is
   0 created or replayed (job id on stdout)       17 died before COMMIT
  20 conflict (key_payload_conflict on stdout)    18 died after COMMIT
   1 any other error, in one line on stderr        2 wrong arguments
example: %(prog)s --keep kept
         %(prog)s worker kept/case-2.sqlite op-a weekly none"""
PASS = """PASS: exit statuses, answers, jobs and receipts are what each case expects.
Cases 2 and 3 differ only in the key: same key, one job; new key, two jobs.
Cases 3 and 5 end in the same rows: afterwards nothing in the database tells an
accidental duplicate from an intended second job."""
KEPT = """
case-1.sqlite to case-5.sqlite are in {!a}. To look into one, go there and run:
python -c "import sqlite3 as s; print(*s.connect('case-3.sqlite').iterdump())\""""


def lab(arguments: list[str]) -> int:
    """Run the five cases, print what was seen, and return the exit status."""
    import argparse
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=HELP, formatter_class=raw)
    parser.add_argument("--keep", metavar="DIR", help="make DIR, leave databases there")
    keep = parser.parse_args(arguments).keep
    if keep is not None:
        os.mkdir(keep)  # or FileExistsError: nothing of anybody's is overwritten
    # The cases share nothing, so they run side by side.
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor() as pool:
        observations = list(pool.map(observe, CASES, [keep or temporary] * len(CASES)))
    complaints = judge_all(observations)
    kept = [KEPT.format(keep)] if keep else []
    lines = [table(observations), "", *(complaints or [PASS]), *kept, ""]
    sys.stdout.write("\n".join(lines))  # in one piece, for readers such as `| head`
    sys.stdout.flush()
    return 1 if complaints else 0


def main(arguments: list[str]) -> int:
    """Run a worker or the lab; return the exit status. An error becomes one line."""
    if not os.path.isfile(main.__code__.co_filename):  # pasted at a prompt or in a cell
        sys.exit("error: save this as a file first: workers are started from that file")
    if None in (sys.stdout, sys.stderr):  # closed by the shell, as >&- does
        sys.exit("error: standard output and standard error must be open")
    try:
        return worker(arguments[1:]) if arguments[:1] == ["worker"] else lab(arguments)
    except (OSError, sqlite3.Error, UnicodeEncodeError, KeyboardInterrupt) as error:
        print(f"error: {str(error) or 'interrupted'}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # it was stdout that failed: Python must not try again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 2 if isinstance(error, FileExistsError) else 1  # --keep DIR was there


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
