"""Which rule does each check of the five cases guard?

Every broken lab below is retry_lab.py with one rule taken out, run as a user would run
it. It must fail, with the complaint beside it. README.md has six more, which
test_readme.py runs.
"""

import unittest
from collections import namedtuple

from tests.support import LabTest, run, side_by_side

CALL = "job_id = create_job(database, key, report, fault)"
COMMIT = '        db.execute("COMMIT")\n'
DIES_BEFORE = '        if fault == "before_commit":\n'
REJECT = "        else:  # reject\n"
ONE, TWO = "[(1, 'weekly')]", "[(1, 'weekly'), (2, 'weekly')]"
OP_A = "('op-a', 'weekly', 1)"
SWAPPED = "[('op-a', 'weekly', 2), ('op-b', 'weekly', 1)]"


def then(*statements: str) -> str:
    """Return lines that execute `statements` inside create_job."""
    return "".join(f"        db.execute({sql!r})\n" for sql in statements)


# A rule, a place in the lab, what stands there once it is broken, and which complaint
# that draws: where, what was expected, what was seen.
Broken = namedtuple("Broken", "rule old new where expected saw")
BROKEN = (
    Broken(
        "take the whole key",
        CALL,
        CALL.replace("key", "key[:3]"),
        "FAIL case 3: next attempt: stdout",
        r"'2\n'",
        r"'1\n'",
    ),
    Broken(
        "give each key the receipt of its own job",
        DIES_BEFORE,
        "        if job_id == 2:\n    "
        + then("UPDATE receipts SET job_id = -job_id")
        + then("UPDATE receipts SET job_id = job_id + 3 WHERE job_id < 0")
        + DIES_BEFORE,
        "FAIL case 3: next attempt: receipts",
        f"[{OP_A}, ('op-b', 'weekly', 2)]",
        SWAPPED,
    ),
    Broken(
        "keep the receipts",
        COMMIT,
        COMMIT + then("DELETE FROM receipts"),
        "FAIL case 2: first call: receipts",
        f"[{OP_A}]",
        "[]",
    ),
    Broken(
        "make no job that nobody asked for",
        COMMIT,
        then("INSERT OR IGNORE INTO jobs VALUES (9, 'weekly')") + COMMIT,
        "FAIL case 5: next attempt: jobs",
        TWO,
        "[(1, 'weekly'), (9, 'weekly'), (10, 'weekly')]",
    ),
    Broken(
        "leave a rejected call's rows as they are",
        REJECT,
        REJECT + "    " + then("UPDATE jobs SET report = 'daily'") + "    " + COMMIT,
        "FAIL case 4: next attempt: jobs",
        ONE,
        "[(1, 'daily')]",
    ),
    Broken(
        "answer after COMMIT",
        DIES_BEFORE,
        "        print(job_id, flush=True)\n" + DIES_BEFORE,
        "FAIL case 1: first call: stdout",
        "''",
        r"'1\n'",
    ),
    Broken(
        "commit job and receipt together",
        "            ).lastrowid\n",
        "            ).lastrowid\n    " + COMMIT + "    " + then("BEGIN IMMEDIATE"),
        "FAIL case 1: first call: jobs",
        "[]",
        ONE,
    ),
    Broken(
        "die, and raise no exception",
        "os._exit(18)",
        'raise RuntimeError("crash")',
        "VOID case 2: first call: exit",
        "18",
        "1\n  stderr   'RuntimeError: crash'",
    ),
)


class BrokenLabs(LabTest):
    def test_each_broken_rule_draws_its_complaint(self) -> None:
        def broken_lab(number: int) -> object:
            broken = BROKEN[number]
            edit = (broken.old, broken.new)
            try:
                return run(self.edited_lab(edit, name=f"lab_{number}.py"))
            except ValueError as stale:
                return stale

        ends = side_by_side(broken_lab, range(len(BROKEN)))
        for broken, done in zip(BROKEN, ends):
            with self.subTest(broken.rule):
                if isinstance(done, ValueError):
                    self.fail(str(done))
                self.assertEqual((done.returncode, done.stderr), (1, ""))
                lines = f"  expected {broken.expected}\n  saw      {broken.saw}\n"
                self.assertIn(f"\n{broken.where}\n{lines}", done.stdout)
                self.assertNotIn("PASS", done.stdout)
                # Whatever went wrong, all five cases ran and have their row.
                self.assertEqual(done.stdout.count("\n|"), 6)


if __name__ == "__main__":
    unittest.main()
