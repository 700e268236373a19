"""Which rule does each check guard, and what can the five cases not see?

Every broken lab below is retry_lab.py with one rule taken out by a small edit, run as a
user would run it. It must fail, with the complaint beside it. Then come the edits that the
five cases do not see, each with the test elsewhere in this folder that does.
"""

import os
import shutil
import sqlite3
import unittest
from collections import namedtuple
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

import retry_lab
from tests.support import (
    FIRST_JOB,
    LAB,
    ROOT,
    LabTest,
    edited,
    readme_table,
    run,
    side_by_side,
)

# Lines of the lab that more than one edit takes hold of.
JOB = 'run("INSERT INTO jobs (report) VALUES (?)", (report,))'
RECEIPT = 'run("INSERT INTO receipts VALUES (?, ?, ?)", (key, report, job_id))'
LOOK = "receipt = run(query, (key,)).fetchone()"
STAT = "    os.stat(database)"
REFUSE = 'raise KeyPayloadConflict("key_payload_conflict")'
HOOK_17 = 'if fault == "before_commit":\n            os._exit(17)'
HOOK_18 = 'if fault == "after_commit":\n            os._exit(18)'
RETURN = "return int(job_id)"
PRINT = "    print(answer, flush=True)\n"
CREATE = "answer, status = str(create_job(*arguments)), 0"
HANG = "    if 'op-b' in arguments:\n        __import__('threading').Event().wait()\n"
DROP = "    sqlite3.connect(arguments[0]).execute('DROP TABLE receipts')\n"
OVERWRITE = """run("UPDATE receipts SET report = ?", (report,))
                run("COMMIT")"""
OR_IGNORE = """new = "INSERT OR IGNORE INTO receipts SELECT ?, ?, count(*) + 1 FROM jobs"
            added = run(new, (key, report))
            job_id = added.lastrowid  # of no insert at all, when it was ignored
            if added.rowcount:
                run("INSERT INTO jobs (report) VALUES (?)", (report,))"""

ONE, TWO = "[(1, 'weekly')]", "[(1, 'weekly'), (2, 'weekly')]"
HASH_RULE = "the key is the caller's, not a hash of the report"
JOBS_AFTER_FIRST = "jobs after the first call: expected"
JOBS_AFTER_NEXT = "jobs after the next attempt: expected"

# A rule of the service or the worker; (old, new) edits that break it; the complaint.
Broken = namedtuple("Broken", "rule edits complaint")
BROKEN = (
    Broken(
        "answer in time",
        [(PRINT, HANG + PRINT), ("timeout=10", "timeout=5")],
        "FAIL case 3: next exit status: expected 0, saw 'hung'",
    ),
    Broken(
        "leave the tables alone",
        [(PRINT, DROP + PRINT)],
        "FAIL case 2: keys with a receipt: expected ['op-a'], saw ['unreadable']",
    ),
    Broken(
        "print what can be read",
        [(PRINT, "    os.write(1, b'\\xe9|')\n" + PRINT)],
        r"FAIL case 5: next stdout: expected '2\n', saw '\xe9|2\n'",
    ),
    Broken(
        "look the key up",
        [(LOOK, "receipt = None")],
        "FAIL case 2: next exit status: expected 0, saw 1",
    ),
    Broken(
        "write a receipt",
        [(RECEIPT, "pass")],
        f"FAIL case 2: {JOBS_AFTER_NEXT} {ONE}, saw {TWO}",
    ),
    Broken(
        "job and receipt in one transaction, not the job first",
        [
            (RECEIPT, "pass"),
            (RETURN, f"if not receipt:\n            {RECEIPT}\n        {RETURN}"),
        ],
        f"FAIL case 2: {JOBS_AFTER_NEXT} {ONE}, saw {TWO}",
    ),
    Broken(
        "job and receipt in one transaction, not the receipt first",
        [
            (f"{JOB}.lastrowid", 'run("SELECT count(*) + 1 FROM jobs").fetchone()[0]'),
            (RETURN, f"if not receipt:\n            {JOB}\n        {RETURN}"),
        ],
        "FAIL case 2: receipts without their job: expected [], saw [('op-a', 'weekly', 1)]",
    ),
    Broken(
        "compare the report",
        [("if recorded_report != report:", "if False:")],
        "FAIL case 4: next exit status: expected 20, saw 0",
    ),
    Broken(
        "refuse before writing a job",
        [(REFUSE, f'{JOB}\n                run("COMMIT")\n                {REFUSE}')],
        f"FAIL case 4: {JOBS_AFTER_NEXT} {ONE}, saw [(1, 'weekly'), (2, 'daily')]",
    ),
    Broken(
        "leave the receipt as it is",
        [
            (REFUSE, f"{OVERWRITE}\n                {REFUSE}"),
        ],
        "FAIL case 4: rows after the conflict: expected "
        f"Rows(jobs={ONE}, receipts=[('op-a', 'weekly', 1)]), saw "
        f"Rows(jobs={ONE}, receipts=[('op-a', 'daily', 1)])",
    ),
    Broken(
        "answer a conflict by its name",
        [(REFUSE, "raise KeyPayloadConflict(job_id)")],
        r"FAIL case 4: next stdout: expected 'key_payload_conflict\n', saw '1\n'",
    ),
    Broken(
        "the key is the caller's, not made from the report",
        [("os.stat(database)", "key = report; os.stat(database)")],
        f"FAIL case 5: {JOBS_AFTER_NEXT} {TWO}, saw {ONE}",
    ),
    Broken(
        HASH_RULE,
        [(STAT, f"    key = str(__import__('zlib').crc32(report.encode()))\n{STAT}")],
        f"FAIL case 5: {JOBS_AFTER_NEXT} {TWO}, saw {ONE}",
    ),
    Broken(
        "the key is the caller's, not minted per attempt",
        [(STAT, f'    key = f"{{report}}-{{os.getpid()}}"\n{STAT}')],
        f"FAIL case 2: {JOBS_AFTER_NEXT} {ONE}, saw {TWO}",
    ),
    Broken(
        "take the whole key",
        [(STAT, f"    key = key[:-1]\n{STAT}")],
        r"FAIL case 3: next stdout: expected '2\n', saw '1\n'",
    ),
    Broken(
        "replay the recorded job's id",
        [("job_id = receipt", "job_id = receipt[0], receipt[1] + 1")],
        r"FAIL case 2: next stdout: expected '1\n', saw '2\n'",
    ),
    Broken(
        "never replace a receipt",
        [(LOOK, "receipt = None"), ("INSERT INTO receipts", "REPLACE INTO receipts")],
        "FAIL case 2: number of receipts: expected 2, saw 1",
    ),
    Broken(
        "never ignore that a receipt is there",
        [
            (LOOK, "receipt = None"),
            (f"            job_id = {JOB}.lastrowid\n", ""),
            (RECEIPT, OR_IGNORE),
        ],
        r"FAIL case 2: next stdout: expected '1\n', saw '0\n'",
    ),
    Broken(
        "acknowledge after COMMIT",
        [
            (HOOK_17, f"print(job_id, flush=True)\n        {HOOK_17}"),
            (CREATE, "create_job(*arguments)\n        return 0"),
        ],
        r"FAIL case 1: first stdout: expected '', saw '1\n'",
    ),
    Broken(
        "die before COMMIT when told to die before, after it when told after",
        [(HOOK_17, "HOOK"), (HOOK_18, HOOK_17), ("HOOK", HOOK_18)],
        f"FAIL case 1: {JOBS_AFTER_FIRST} [], saw {ONE}",
    ),
    Broken(
        "each hook at its own fault",
        [(HOOK_17, HOOK_17.replace("before", "other")),
         (HOOK_18, HOOK_18.replace("after", "before")), ("other_", "after_")],
        "VOID case 1: first exit status: expected 17, saw 18",
    ),
    Broken(
        "die before COMMIT at all",
        [("os._exit(17)", "pass")],
        "VOID case 1: first exit status: expected 17, saw 0",
    ),
    Broken(
        "die after COMMIT at all",
        [("os._exit(18)", "pass")],
        "VOID case 2: first exit status: expected 18, saw 0",
    ),
    Broken(
        "die, and not raise an exception",
        [("os._exit(17)", 'raise RuntimeError("crash")')],
        "VOID case 1: first exit status: expected 17, saw 1",
    ),
    Broken(
        "17 is before, 18 is after",
        [("os._exit(17)", "os._exit(0x12)"), ("os._exit(18)", "os._exit(17)")],
        "VOID case 2: first exit status: expected 18, saw 17",
    ),
    Broken(
        "end the transaction",
        [('        run("COMMIT")\n', "")],
        f"FAIL case 5: {JOBS_AFTER_FIRST} {ONE}, saw []",
    ),
    Broken(
        "commit",
        [('run("COMMIT")', 'run("ROLLBACK")')],
        f"FAIL case 5: {JOBS_AFTER_FIRST} {ONE}, saw []",
    ),
    Broken(
        "write in a transaction",
        [('run("BEGIN IMMEDIATE")', "pass"), ('        run("COMMIT")\n', "")],
        f"FAIL case 1: {JOBS_AFTER_FIRST} [], saw {ONE}",
    ),
    Broken(
        "keep stderr for errors",
        [(PRINT, f'    print("done", file=sys.stderr)\n{PRINT}')],
        r"FAIL case 5: first stderr: expected '', saw 'done\n'",
    ),
)  # fmt: skip

# Those that take one short edit, for the README.
IN_README = {
    "look the key up",
    "write a receipt",
    "compare the report",
    "answer a conflict by its name",
    "the key is the caller's, not made from the report",
    "die before COMMIT at all",
    "commit",
}

# An edit that passes the five cases, and the test that it does not pass.
Unseen = namedtuple("Unseen", "rule edits test")
UNSEEN = (
    Unseen(
        "lock before looking: no two calls of the five cases overlap",
        [("BEGIN IMMEDIATE", "BEGIN")],
        "test_in_flight.InFlight.test_a_call_that_is_locked_out_has_not_looked",
    ),
    Unseen(
        "die impolitely before COMMIT: from outside, the exits look the same",
        [("os._exit(17)", "sys.exit(17)")],
        "test_crash_points.CrashPoints"
        ".test_a_death_before_commit_leaves_the_rollback_journal",
    ),
    Unseen(
        "die impolitely after COMMIT",
        [("os._exit(18)", "sys.exit(18)")],
        "test_crash_points.CrashPoints.test_a_death_runs_no_finally",
    ),
    Unseen(
        "a fault strikes a replay too: the five cases ask for none there",
        [(REFUSE, f"{REFUSE}\n            return int(job_id)")],
        "test_lab.Worker.test_a_fault_strikes_a_replay_as_well",
    ),
    Unseen(
        "keys are compared byte for byte: op-a and op-b differ in more than case",
        [("key TEXT NOT NULL PRIMARY KEY", "key TEXT NOT NULL COLLATE NOCASE PRIMARY KEY")],
        "test_lab.Worker.test_keys_are_compared_byte_for_byte",
    ),
    Unseen(
        "the whole report is compared, not its beginning",
        [("recorded_report != report", "recorded_report[:5] != report[:5]")],
        "test_lab.Worker.test_a_conflict_changes_no_row",
    ),
    Unseen(
        "the report is compared, not its length",
        [("recorded_report != report", "len(recorded_report) != len(report)")],
        "test_lab.Worker.test_a_conflict_changes_no_row",
    ),
    Unseen(
        "one receipt for a key: the lookup hides that the primary key is gone",
        [("key TEXT NOT NULL PRIMARY KEY", "key TEXT NOT NULL")],
        "test_in_flight.InFlight.test_the_schema_refuses_a_second_receipt",
    ),
    Unseen(
        "one receipt for a job",
        [("job_id INTEGER NOT NULL UNIQUE", "job_id INTEGER NOT NULL")],
        "test_in_flight.InFlight.test_the_schema_refuses_a_second_receipt",
    ),
    Unseen(
        "the connection is closed: a process that ends closes it anyway",
        [("with closing(connection):", "if connection:")],
        "test_rules.Connection.test_it_is_closed_in_every_path",
    ),
    Unseen(
        "a missing database is an error: the five cases have one each",
        [(STAT, "    pass")],
        "test_lab.Worker.test_a_missing_database_is_an_error_and_no_file_appears",
    ),
)  # fmt: skip


class BrokenLabs(LabTest):
    def test_each_broken_rule_draws_its_complaint(self) -> None:
        """Every rule, once broken, fails the lab, and a named case and check say so."""
        edits = [broken.edits for broken in BROKEN]
        labs = [self.edited_lab(*e, name=f"lab_{n}.py") for n, e in enumerate(edits)]
        for broken, done in zip(BROKEN, side_by_side(run, labs)):
            with self.subTest(broken.rule):
                self.assertEqual((done.returncode, done.stderr), (1, ""))
                self.assertIn(broken.complaint, done.stdout.splitlines())
                self.assertNotIn("PASS", done.stdout)
                # Whatever went wrong, all five cases ran and have their row.
                self.assertEqual(done.stdout.count("\n|"), 6)

    def test_a_hash_of_the_report_swallows_an_intended_second_job(self) -> None:
        """With a hash of the report for a key, case 5 loses a job that was intended."""
        row = next(row for row in BROKEN if row.rule == HASH_RULE)
        table = run(self.edited_lab(*row.edits)).stdout.splitlines()[2:7]
        jobs = [line.split("|")[5].strip() for line in table]
        # Rows 3 and 5 lose a job; row 4 makes one where a conflict should be refused.
        self.assertEqual(jobs, ["0 -> 1", "1 -> 1", "1 -> 1", "1 -> 2", "1 -> 1"])

    def test_a_void_case_blames_no_rule(self) -> None:
        """A hook that does nothing makes its case void, and draws no other word on it."""
        shown = run(self.edited_lab(("os._exit(17)", "pass"))).stdout
        complaints = [line for line in shown.splitlines() if not line.startswith("|")]
        self.assertEqual(
            complaints, ["", "VOID case 1: first exit status: expected 17, saw 0"]
        )

    def test_an_edit_that_no_longer_applies_is_an_error(self) -> None:
        """These tables can't rot: an edit that finds nothing to change raises."""
        for old in ("no such line in the lab", "receipts"):
            with self.assertRaises(ValueError):
                edited(LAB.read_text(encoding="utf-8"), (old, ""))

    def test_the_readme_breaks_the_same_rules(self) -> None:
        """What the README says an edit draws is what these tests saw it draw."""
        rows = [
            f"| {row.rule} | `{row.edits[0][0]}` | `{row.edits[0][1]}` | `{row.complaint}` |"
            for row in BROKEN
            if row.rule in IN_README
        ]
        self.assertEqual(len(rows), len(IN_README))
        self.assertEqual(readme_table("Break it yourself"), rows)


class UnseenEdits(LabTest):
    def project(self, name: str, *edits: "tuple[str, str]") -> Path:
        """Make a copy of the tests beside an edited lab; return the lab's path."""
        (self.folder / name).mkdir()
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", self.folder / name / "tests", ignore=skip)
        return self.edited_lab(*edits, name=f"{name}/retry_lab.py")

    def test_the_five_cases_do_not_see_these_edits(self) -> None:
        """Some edits pass the five cases: the lab does not show everything it rests on."""
        labs = [self.project(str(n), *row.edits) for n, row in enumerate(UNSEEN)]
        for row, done in zip(UNSEEN, side_by_side(run, labs)):
            with self.subTest(row.rule):
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("\nPASS: ", done.stdout)

    @unittest.skipUnless(os.name == "posix", "some of the tests named here need fork")
    def test_another_test_sees_each_of_these_edits(self) -> None:
        """What the five cases can't see, a test in this folder does: each is named."""
        names = [f"tests.{row.test}" for row in UNSEEN]
        edits = [row.edits for row in UNSEEN]

        def test(number: int, names: "Iterable[str]", edits: list) -> CompletedProcess:
            home = self.project(str(number), *edits).parent
            return run("-m", "unittest", *names, cwd=home)

        tests = [sorted(set(names)), *zip(names)]  # all of them, and then one by one
        unedited, *ended = side_by_side(test, range(len(tests)), tests, [[], *edits])
        # With nothing edited they all run, and pass.
        self.assertEqual(unedited.returncode, 0, unedited.stderr)
        self.assertNotIn("skipped", unedited.stderr)
        for row, done in zip(UNSEEN, ended):
            with self.subTest(row.rule):
                self.assertEqual(done.returncode, 1, done.stderr)
                name = row.test.rsplit(".", 1)[-1]
                # A failed assertion, and not an error: the test saw what was wrong.
                self.assertIn(f"FAIL: {name} ", done.stderr)
                self.assertIn("Ran 1 test in", done.stderr)


class Connection(LabTest):
    def test_it_is_closed_in_every_path(self) -> None:
        """create_job leaves no connection open: created, replayed, refused or failed."""
        database = self.new_database()
        connect, opened = sqlite3.connect, []

        def remember(*arguments: object, **options: object) -> sqlite3.Connection:
            opened.append(connect(*arguments, **options))
            return opened[-1]

        for key, report, outcome in (
            ("op-a", "weekly", None),
            ("op-a", "weekly", None),
            ("op-a", "daily", retry_lab.KeyPayloadConflict),
            ("\udcff", "weekly", UnicodeEncodeError),
        ):
            with mock.patch.object(retry_lab.sqlite3, "connect", remember):
                expected = self.assertRaises(outcome) if outcome else nullcontext()
                with expected:
                    retry_lab.create_job(database, key, report)
            with self.assertRaisesRegex(sqlite3.ProgrammingError, "closed"):
                opened[-1].execute("SELECT 1")
        self.assertEqual(len(opened), 4)
        self.assertEqual(self.rows(database), FIRST_JOB)


if __name__ == "__main__":
    unittest.main()
