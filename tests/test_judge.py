"""Can each check of the lab fail, and does each speak only of what it checks?

The judge is a pure function, so it can be handed what no honest worker would produce.
What is seen is of the same type as a case, and honest if it is equal to the case. Below,
each field of each call is altered alone, and must draw its own complaint and no other.
"""

import unittest

import retry_lab
from retry_lab import CASES, Call

ALTERED = Call("op-x", "yearly", "other", 99, "7\n", [(7, "x")], [("op-a", "x", 7)])
NAMES = ("first call", "next attempt")


def altered(case: "list[Call]", place: int, **fields: object) -> "list[Call]":
    """Return the calls of `case`, the one at `place` (0 or 1) with `fields` altered."""
    seen = list(case)
    seen[place] = seen[place]._replace(**fields)
    return seen


def complaint(title: str, expected: object, saw: object, stderr: str = "") -> str:
    """Return the complaint that a wrong field draws."""
    lines = f"  expected {expected!a}\n  saw      {saw!a}\n  stderr   {stderr!a}"
    return f"{title}\n{lines}"


def judged(number: int, seen: "list[Call]") -> str:
    """Return what the lab would print of its complaints about a case."""
    return "\n".join(retry_lab.judge(number, CASES[number - 1], seen))


class Judge(unittest.TestCase):
    def test_the_cases_are_the_five_of_the_design(self) -> None:
        shown = [[(c.key, c.report, c.fault, c.exit) for c in case] for case in CASES]
        before = ("op-a", "weekly", "before_commit", 17)
        after = ("op-a", "weekly", "after_commit", 18)
        answered = ("op-a", "weekly", "none", 0)
        new_key = ("op-b", "weekly", "none", 0)
        expected = [
            [before, answered],
            [after, answered],
            [after, new_key],
            [after, ("op-a", "daily", "none", 20)],
            [answered, new_key],
        ]
        self.assertEqual(shown, expected)
        third, fifth = (
            CASES[2][1],
            CASES[4][1],
        )  # of which PASS says that they end alike
        self.assertEqual((third.jobs, third.receipts), (fifth.jobs, fifth.receipts))

    def test_honest_observations_draw_no_complaint(self) -> None:
        for number, case in enumerate(CASES, 1):
            self.assertEqual(judged(number, case), "")
            noted = altered(case, 1, stderr="a debugger's note")
            self.assertEqual(judged(number, noted), "")

    def test_each_field_altered_alone_draws_its_own_complaint(self) -> None:
        for number, case in enumerate(CASES, 1):
            for place, name in enumerate(NAMES):
                for field in Call._fields[:-1]:
                    void = field == "exit" and case[place].fault != "none"
                    title = f"{'VOID' if void else 'FAIL'} case {number}: {name}"
                    right, wrong = getattr(case[place], field), getattr(ALTERED, field)
                    with self.subTest(title, field=field):
                        seen = altered(case, place, **{field: wrong})
                        expected = complaint(f"{title}: {field}", right, wrong)
                        self.assertEqual(judged(number, seen), expected)

    def test_a_worker_that_did_not_die_as_told_makes_its_case_void(self) -> None:
        """No death, or another death, and there is no word on what came after it."""
        for number, status in ((1, 18), (2, 17), (3, 0), (4, 1)):
            case = CASES[number - 1]
            seen = altered(case, 0, exit=status, stdout="?", jobs=[])
            seen = altered(seen, 1, exit=1, stdout="?", jobs=[])
            title = f"VOID case {number}: first call: exit"
            expected = complaint(title, case[0].exit, status)
            self.assertEqual(judged(number, seen), expected)

    def test_a_complaint_shows_why_the_worker_ended(self) -> None:
        """That is the last line of its stderr; of a fatal error it is the first."""
        traceback = 'Traceback:\n  File "lab.py"\nNameError: no \xe9\n\n'
        fatal = "Fatal Python error: no encodings\n\nCurrent thread:\n  <no frame>\n"
        for stderr, reason in (
            (traceback, "NameError: no \xe9"),
            (fatal, "Fatal Python error: no encodings"),
        ):
            seen = altered(CASES[1], 1, exit=1, stderr=stderr)
            expected = complaint("FAIL case 2: next attempt: exit", 0, 1, reason)
            self.assertEqual(judged(2, seen), expected)


class Printer(unittest.TestCase):
    def test_a_row_shows_what_was_seen(self) -> None:
        """Also what no case expects, and nothing that can break the table."""
        call = CASES[0][1]
        first = call._replace(exit=3, jobs=[(1, "x")] * 3)
        retry = call._replace(key="op-c", report="daily", exit=4, stdout="|\n2")
        row = retry_lab.row(7, first, retry)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        request = "new key, other report"
        expected = ["7", "unclear", request, "3 -> 4", "3 -> 1", "unclear"]
        self.assertEqual(cells, expected)


if __name__ == "__main__":
    unittest.main()
