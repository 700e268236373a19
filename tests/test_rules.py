"""Which rule does each check guard, and what can the five cases not see?

Every broken lab below is retry_lab.py with one rule taken out by a small diff, run as a
user would run it. It must fail, with the complaint beside it. Then come the edits that the
five cases do not see, each with the test elsewhere in this folder that does.
"""

import shutil
import sqlite3
import unittest
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import retry_lab
from tests.support import (
    FIRST_JOB,
    ROOT,
    SOURCE,
    LabTest,
    edited,
    edits_of,
    posix,
    run,
    side_by_side,
)

# A rule of the service or the worker, a diff that breaks it, and a complaint it draws.
Broken = namedtuple("Broken", "rule diff complaint")
BROKEN = (
    Broken(
        "look the key up",
        """
-        if receipt is None:  # create
+        if True:  # create
""",
        """\
FAIL case 2: next attempt: exit
  expected 0
  saw      1""",
    ),
    Broken(
        "write a receipt",
        """
-            db.execute(
-                "INSERT INTO receipts VALUES (?, ?, ?)",
-                (key, report, job_id),
-            )
""",
        """\
FAIL case 2: next attempt: jobs
  expected [(1, 'weekly')]
  saw      [(1, 'weekly'), (2, 'weekly')]""",
    ),
    Broken(
        "write job and receipt in one transaction",
        """
             ).lastrowid
+            db.execute("COMMIT")
+            db.execute("BEGIN IMMEDIATE")
""",
        """\
FAIL case 1: first call: jobs
  expected []
  saw      [(1, 'weekly')]""",
    ),
    Broken(
        "compare the report",
        """
-        elif receipt["report"] == report:  # replay
+        elif True:  # replay
""",
        """\
FAIL case 4: next attempt: exit
  expected 20
  saw      0""",
    ),
    Broken(
        "take the caller's key, not a hash of the report",
        """
-        job_id = create_job(database, key, report, fault)
+        from zlib import crc32
+        key = str(crc32(report.encode()))
+        job_id = create_job(database, key, report, fault)
""",
        """\
FAIL case 5: next attempt: jobs
  expected [(1, 'weekly'), (2, 'weekly')]
  saw      [(1, 'weekly')]""",
    ),
    Broken(
        "take the caller's key, not one minted for each attempt",
        """
-        job_id = create_job(database, key, report, fault)
+        key = f"attempt-{os.getpid()}"
+        job_id = create_job(database, key, report, fault)
""",
        """\
FAIL case 2: next attempt: jobs
  expected [(1, 'weekly')]
  saw      [(1, 'weekly'), (2, 'weekly')]""",
    ),
    Broken(
        "take the whole key",
        """
-        job_id = create_job(database, key, report, fault)
+        job_id = create_job(database, key[:3], report, fault)
""",
        """\
FAIL case 3: next attempt: stdout
  expected '2\\n'
  saw      '1\\n'""",
    ),
    Broken(
        "commit",
        """
-        db.execute("COMMIT")
+        db.execute("ROLLBACK")
""",
        """\
FAIL case 5: first call: jobs
  expected [(1, 'weekly')]
  saw      []""",
    ),
    Broken(
        "write in a transaction",
        """
-        db.execute("BEGIN IMMEDIATE")
@@
-        db.execute("COMMIT")
""",
        """\
FAIL case 1: first call: jobs
  expected []
  saw      [(1, 'weekly')]""",
    ),
    Broken(
        "reject before a row is written",
        """
         else:  # reject
+            db.execute("INSERT INTO jobs (report) VALUES (?)", (report,))
+            db.execute("COMMIT")
""",
        """\
FAIL case 4: next attempt: jobs
  expected [(1, 'weekly')]
  saw      [(1, 'weekly'), (2, 'daily')]""",
    ),
    Broken(
        "leave a rejected key's receipt as it is",
        """
         else:  # reject
+            db.execute("UPDATE receipts SET report = ?", (report,))
+            db.execute("COMMIT")
""",
        """\
FAIL case 4: next attempt: receipts
  expected [('op-a', 'weekly', 1)]
  saw      [('op-a', 'daily', 1)]""",
    ),
    Broken(
        "answer a conflict by its name",
        """
-        print("key_payload_conflict", flush=True)
+        print("conflict", flush=True)
""",
        """\
FAIL case 4: next attempt: stdout
  expected 'key_payload_conflict\\n'
  saw      'conflict\\n'""",
    ),
    Broken(
        "replay the recorded job's id",
        """
-            job_id = receipt["job_id"]
+            job_id = receipt["job_id"] + 1
""",
        """\
FAIL case 2: next attempt: stdout
  expected '1\\n'
  saw      '2\\n'""",
    ),
    Broken(
        "leave a replayed job as it is",
        """
         elif receipt["report"] == report:  # replay
+            db.execute("UPDATE jobs SET report = 'daily'")
""",
        """\
FAIL case 2: next attempt: jobs
  expected [(1, 'weekly')]
  saw      [(1, 'daily')]""",
    ),
    Broken(
        "never replace a receipt",
        """
-        if receipt is None:  # create
+        if True:  # create
@@
-                "INSERT INTO receipts VALUES (?, ?, ?)",
+                "INSERT OR REPLACE INTO receipts VALUES (?, ?, ?)",
""",
        """\
FAIL case 2: next attempt: receipts
  expected [('op-a', 'weekly', 1)]
  saw      [('op-a', 'weekly', 2)]""",
    ),
    Broken(
        "never ignore that a receipt is there",
        """
-        if receipt is None:  # create
+        if True:  # create
@@
-                "INSERT INTO receipts VALUES (?, ?, ?)",
+                "INSERT OR IGNORE INTO receipts VALUES (?, ?, ?)",
""",
        """\
FAIL case 2: next attempt: stdout
  expected '1\\n'
  saw      '2\\n'""",
    ),
    Broken(
        "give each key the receipt of its own job",
        """
                 (key, report, job_id),
             )
+            if job_id == 2:
+                db.execute("UPDATE receipts SET job_id = job_id - 3")
+                db.execute("UPDATE receipts SET job_id = -job_id")
""",
        """\
FAIL case 3: next attempt: receipts
  expected [('op-a', 'weekly', 1), ('op-b', 'weekly', 2)]
  saw      [('op-a', 'weekly', 2), ('op-b', 'weekly', 1)]""",
    ),
    Broken(
        "keep the receipts",
        """
         db.execute("COMMIT")
+        db.execute("DELETE FROM receipts")
""",
        """\
FAIL case 2: first call: receipts
  expected [('op-a', 'weekly', 1)]
  saw      []""",
    ),
    Broken(
        "make no job that nobody asked for",
        """
         db.execute("COMMIT")
+        db.execute("INSERT OR IGNORE INTO jobs VALUES (9, 'weekly')")
+        db.execute("INSERT OR IGNORE INTO receipts VALUES ('x', 'weekly', 9)")
""",
        """\
FAIL case 2: first call: receipts
  expected [('op-a', 'weekly', 1)]
  saw      [('op-a', 'weekly', 1), ('x', 'weekly', 9)]""",
    ),
    Broken(
        "answer after COMMIT",
        """
-    print(job_id, flush=True)
@@
+        print(job_id, flush=True)
         if fault == "before_commit":
""",
        """\
FAIL case 1: first call: stdout
  expected ''
  saw      '1\\n'""",
    ),
    Broken(
        "keep stderr for errors",
        """
-    print(job_id, flush=True)
+    print(job_id, flush=True)
+    print("done", file=sys.stderr)
""",
        """\
FAIL case 5: first call: stderr
  expected ''
  saw      'done'""",
    ),
    Broken(
        "print what can be read",
        """
-    print(job_id, flush=True)
+    print(job_id, flush=True)
+    os.write(1, b"\\xe9|")
""",
        """\
FAIL case 5: first call: stdout
  expected '1\\n'
  saw      '1\\n\\xe9|'""",
    ),
    Broken(
        "die before COMMIT when told to die before it",
        """
+        db.execute("COMMIT")
         if fault == "before_commit":
@@
-        db.execute("COMMIT")
         if fault == "after_commit":
""",
        """\
FAIL case 1: first call: jobs
  expected []
  saw      [(1, 'weekly')]""",
    ),
    Broken(
        "die before COMMIT at all",
        """
-            os._exit(17)
+            pass
""",
        """\
VOID case 1: first call: exit
  expected 17
  saw      0""",
    ),
    Broken(
        "die after COMMIT at all",
        """
-            os._exit(18)
+            pass
""",
        """\
VOID case 2: first call: exit
  expected 18
  saw      0""",
    ),
    Broken(
        "die, and raise no exception",
        """
-            os._exit(18)
+            raise RuntimeError("crash")
""",
        """\
VOID case 2: first call: stderr
  expected ''
  saw      'RuntimeError: crash'""",
    ),
    Broken(
        "17 is before, 18 is after",
        """
-            os._exit(17)
+            os._exit(18)
""",
        """\
VOID case 1: first call: exit
  expected 17
  saw      18""",
    ),
)
HASH_RULE = "take the caller's key, not a hash of the report"

# An edit that passes the five cases, and the test that it does not pass.
Unseen = namedtuple("Unseen", "rule diff test")
UNSEEN = (
    Unseen(
        "lock before looking: no two calls of the five cases overlap",
        """
-        db.execute("BEGIN IMMEDIATE")
+        db.execute("BEGIN")
""",
        "experiments.test_in_flight.InFlight"
        ".test_a_call_that_is_locked_out_has_not_looked",
    ),
    Unseen(
        "die impolitely before COMMIT: from outside, the exits look the same",
        """
-            os._exit(17)
+            sys.exit(17)
""",
        "experiments.test_crash_points.CrashPoints"
        ".test_a_death_before_commit_leaves_the_rollback_journal",
    ),
    Unseen(
        "die impolitely after COMMIT",
        """
-            os._exit(18)
+            sys.exit(18)
""",
        "experiments.test_crash_points.CrashPoints.test_a_death_runs_no_finally",
    ),
    Unseen(
        "a fault strikes a replay too: the five cases ask for none there",
        """
             job_id = receipt["job_id"]
+            return job_id
""",
        "experiments.test_histories.Histories"
        ".test_a_sample_of_histories_holds_for_workers_started_afresh",
    ),
    Unseen(
        "the answer comes from the receipt: the only replay is of job 1",
        """
-            job_id = receipt["job_id"]
+            job_id = 1
""",
        "test_lab.Worker.test_keys_are_compared_byte_for_byte",
    ),
    Unseen(
        "keys are compared byte for byte: op-a and op-b differ in more than case",
        """
-    key TEXT NOT NULL PRIMARY KEY CHECK (key <> ''),
+    key TEXT COLLATE NOCASE NOT NULL PRIMARY KEY CHECK (key <> ''),
""",
        "test_lab.Worker.test_keys_are_compared_byte_for_byte",
    ),
    Unseen(
        "the whole report is compared, not its beginning",
        """
-        elif receipt["report"] == report:  # replay
+        elif receipt["report"][:5] == report[:5]:  # replay
""",
        "test_lab.Worker.test_a_conflict_changes_no_row",
    ),
    Unseen(
        "one receipt for a key: the look hides that the primary key is gone",
        """
-    key TEXT NOT NULL PRIMARY KEY CHECK (key <> ''),
+    key TEXT NOT NULL CHECK (key <> ''),
""",
        "experiments.test_in_flight.InFlight.test_the_schema_rejects_a_second_receipt",
    ),
    Unseen(
        "one receipt for a job",
        """
-    job_id INTEGER NOT NULL UNIQUE REFERENCES jobs (id)
+    job_id INTEGER NOT NULL REFERENCES jobs (id)
""",
        "experiments.test_in_flight.InFlight.test_the_schema_rejects_a_second_receipt",
    ),
    Unseen(
        "no receipt with an empty key: the worker rejects that before the schema does",
        """
-    key TEXT NOT NULL PRIMARY KEY CHECK (key <> ''),
+    key TEXT NOT NULL PRIMARY KEY,
""",
        "experiments.test_in_flight.InFlight.test_the_schema_rejects_a_second_receipt",
    ),
    Unseen(
        "the connection is closed: a process that ends closes it anyway",
        """
-        db.close()  # what is not committed by now is rolled back
+        pass
""",
        "test_rules.Connection.test_it_is_closed_in_every_path",
    ),
    Unseen(
        "a missing database is an error: the five cases have one each",
        """
-    os.stat(database)  # sqlite3.connect would create a missing file
""",
        "test_lab.Worker.test_a_missing_database_is_an_error_and_no_file_appears",
    ),
)


class BrokenLabs(LabTest):
    def test_each_broken_rule_draws_its_complaint(self) -> None:
        """Every rule, once broken, fails the lab, and a named case and field say so."""
        labs = [
            self.edited_lab(*edits_of(broken.diff), name=f"lab_{number}.py")
            for number, broken in enumerate(BROKEN)
        ]
        for broken, done in zip(BROKEN, side_by_side(run, labs)):
            with self.subTest(broken.rule):
                self.assertEqual((done.returncode, done.stderr), (1, ""))
                self.assertIn(f"\n{broken.complaint}\n", done.stdout)
                self.assertNotIn("PASS", done.stdout)
                # Whatever went wrong, all five cases ran and have their row.
                self.assertEqual(done.stdout.count("\n|"), 6)

    def test_a_hash_of_the_report_repairs_row_3_and_swallows_row_5(self) -> None:
        """With a hash of the report for a key, cases 3 and 5 end with one job each."""
        (diff,) = (broken.diff for broken in BROKEN if broken.rule == HASH_RULE)
        table = run(self.edited_lab(*edits_of(diff))).stdout.splitlines()[2:7]
        jobs = [line.split("|")[5].strip() for line in table]
        # Row 4 makes a job where a conflict should be rejected.
        self.assertEqual(jobs, ["0 -> 1", "1 -> 1", "1 -> 1", "1 -> 2", "1 -> 1"])

    def test_an_edit_that_no_longer_applies_is_an_error(self) -> None:
        """These tables can't rot: an edit that finds nothing to change raises."""
        for old in ("no such line in the lab", "receipts"):
            with self.assertRaises(ValueError):
                edited(SOURCE, (old, ""))


class UnseenEdits(LabTest):
    def project(self, name: str, diff: str) -> Path:
        """Make a copy of the tests beside an edited lab; return the lab's path."""
        (self.folder / name).mkdir()
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", self.folder / name / "tests", ignore=skip)
        edits = edits_of(diff) if diff else []
        return self.edited_lab(*edits, name=f"{name}/retry_lab.py")

    def test_the_five_cases_do_not_see_these_edits(self) -> None:
        """Some edits pass the five cases: the lab does not show everything it rests on."""
        labs = [
            self.edited_lab(*edits_of(row.diff), name=f"{number}.py")
            for number, row in enumerate(UNSEEN)
        ]
        for row, done in zip(UNSEEN, side_by_side(run, labs)):
            with self.subTest(row.rule):
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("\nPASS: ", done.stdout)

    @posix
    def test_another_test_sees_each_of_these_edits(self) -> None:
        """What the five cases can't see, a test in this folder does: each is named."""
        names = [f"tests.{row.test}" for row in UNSEEN]
        homes = [self.project(str(n), row.diff).parent for n, row in enumerate(UNSEEN)]
        intact = self.project("intact", "").parent
        # In an unedited project they all run, and pass.
        done = run("-m", "unittest", *sorted(set(names)), cwd=intact)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("skipped", done.stderr)

        def test(name: str, home: Path) -> object:
            return run("-m", "unittest", name, cwd=home)

        for row, done in zip(UNSEEN, side_by_side(test, names, homes)):
            with self.subTest(row.rule):
                self.assertEqual(done.returncode, 1, done.stderr)
                # A failed assertion, and not an error: the test saw what was wrong.
                self.assertIn("FAIL: " + row.test.rsplit(".", 1)[-1], done.stderr)
                self.assertIn("Ran 1 test in", done.stderr)


class Connection(LabTest):
    def test_it_is_closed_in_every_path(self) -> None:
        """create_job leaves no connection open: created, replayed, rejected or failed."""
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
