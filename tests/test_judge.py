"""Can each check of the lab fail, and does each speak only of what it checks?

The judge is a pure function, so it can be handed what no honest worker would produce.
An honest observation is of the same type as a case, and equal to it. Below, each field
of each call is altered alone, and must draw its own complaint and no other.
"""

import subprocess
import unittest
from unittest import mock

import retry_lab
from retry_lab import CASES, Call

ALTERED = {
    "key": "op-x",
    "report": "yearly",
    "fault": "other",
    "exit": 99,
    "stdout": "7\n",
    "stderr": "?",
    "jobs": [(7, "weekly")],
    "receipts": [("op-a", "weekly", 7)],
}


def altered(case: "list[Call]", place: int, **fields: object) -> "list[Call]":
    """Return the calls of `case`, the one at `place` (0 or 1) with `fields` altered."""
    seen = list(case)
    seen[place] = seen[place]._replace(**fields)
    return seen


def complaint(title: str, expected: object, saw: object) -> str:
    """Return the complaint that a wrong field draws."""
    return f"{title}\n  expected {expected!a}\n  saw      {saw!a}"


class Judge(unittest.TestCase):
    def test_the_cases_are_the_five_of_the_design(self) -> None:
        """What is called, how it exits, and what is there after it, case by case."""
        shown = [
            [(c.key, c.report, c.fault, c.exit, len(c.jobs)) for c in case]
            for case in CASES
        ]
        before, after = "before_commit", "after_commit"
        expected = [
            [("op-a", "weekly", before, 17, 0), ("op-a", "weekly", "none", 0, 1)],
            [("op-a", "weekly", after, 18, 1), ("op-a", "weekly", "none", 0, 1)],
            [("op-a", "weekly", after, 18, 1), ("op-b", "weekly", "none", 0, 2)],
            [("op-a", "weekly", after, 18, 1), ("op-a", "daily", "none", 20, 1)],
            [("op-a", "weekly", "none", 0, 1), ("op-b", "weekly", "none", 0, 2)],
        ]
        self.assertEqual(shown, expected)

    def test_cases_3_and_5_end_in_the_same_rows(self) -> None:
        """What PASS says of cases 3 and 5 is in the rows that the judge asks for."""
        third, fifth = CASES[2][1], CASES[4][1]
        self.assertEqual(third.jobs, [(1, "weekly"), (2, "weekly")])
        self.assertEqual(third.receipts, [("op-a", "weekly", 1), ("op-b", "weekly", 2)])
        self.assertEqual((third.jobs, third.receipts), (fifth.jobs, fifth.receipts))

    def test_honest_observations_draw_no_complaint(self) -> None:
        """What is just as expected draws no complaint, in all five cases."""
        for number, case in enumerate(CASES, 1):
            self.assertEqual(retry_lab.judge(number, case, list(case)), [])

    def test_each_field_altered_alone_draws_its_own_complaint(self) -> None:
        """Each field of each call, altered alone, draws one complaint, and the right one."""
        self.assertEqual(set(ALTERED), set(Call._fields))
        for number, case in enumerate(CASES, 1):
            for place, name in enumerate(("first call", "next attempt")):
                for field, wrong in ALTERED.items():
                    with self.subTest(case=number, call=name, field=field):
                        void = field == "exit" and case[place].fault != "none"
                        verdict = "VOID" if void else "FAIL"
                        title = f"{verdict} case {number}: {name}: {field}"
                        right = getattr(case[place], field)
                        seen = altered(case, place, **{field: wrong})
                        self.assertEqual(
                            retry_lab.judge(number, case, seen),
                            [complaint(title, right, wrong)],
                        )

    def test_every_wrong_field_is_named(self) -> None:
        """A call that is wrong in every field draws a complaint for each."""
        seen = altered(CASES[4], 1, **ALTERED)
        complaints = retry_lab.judge(5, CASES[4], seen)
        named = [line.splitlines()[0].split(": ")[2] for line in complaints]
        self.assertEqual(named, list(Call._fields))

    def test_swapped_receipts_are_a_complaint(self) -> None:
        """Two receipts that hold each other's job id: as many as jobs, and wrong."""
        swapped = [("op-a", "weekly", 2), ("op-b", "weekly", 1)]
        seen = altered(CASES[2], 1, receipts=swapped)
        line = """\
FAIL case 3: next attempt: receipts
  expected [('op-a', 'weekly', 1), ('op-b', 'weekly', 2)]
  saw      [('op-a', 'weekly', 2), ('op-b', 'weekly', 1)]"""
        self.assertEqual(retry_lab.judge(3, CASES[2], seen), [line])

    def test_a_worker_that_did_not_die_as_told_makes_its_case_void(self) -> None:
        """No death, another death or a hung worker: void, and no word on the rest."""
        for number, status in ((1, 18), (2, 17), (3, 0), (4, "hung")):
            case = CASES[number - 1]
            seen = altered(case, 0, exit=status, stdout="?", jobs=[])
            seen = altered(seen, 1, exit=1, stdout="?", jobs=[])
            title = f"VOID case {number}: first call: exit"
            expected = [complaint(title, case[0].exit, status)]
            self.assertEqual(retry_lab.judge(number, case, seen), expected)

    def test_a_void_case_says_what_its_worker_said(self) -> None:
        """The last line that a worker left on stderr stands beside the complaint."""
        traceback = 'Traceback:\n  File "lab.py"\nNameError: no \xe9\n\n'
        for place, verdict, name in (
            (0, "VOID", "first call"),
            (1, "FAIL", "next attempt"),
        ):
            seen = altered(CASES[1], place, exit=1, stderr=traceback)
            complaints = retry_lab.judge(2, CASES[1], seen)
            self.assertEqual(len(complaints), 2)
            title = f"{verdict} case 2: {name}: stderr"
            self.assertEqual(complaints[1], complaint(title, "", "NameError: no \xe9"))

    def test_a_worker_that_does_not_answer_in_time_is_hung(self) -> None:
        """A worker that is killed for being late is hung, with nothing made up."""
        late = subprocess.TimeoutExpired("worker", 10)
        db = mock.Mock()
        with mock.patch("subprocess.run", side_effect=late):
            seen = retry_lab.make_call("worker.pyc", "database", db, CASES[1][1])
        self.assertEqual((seen.exit, seen.stdout, seen.stderr), ("hung", "", ""))


class Printer(unittest.TestCase):
    def cells(self, first: Call, following: Call) -> "list[str]":
        row = retry_lab.table([[first, following]]).splitlines()[2]
        return [cell.strip() for cell in row.strip("|").split("|")]

    def test_a_row_shows_what_was_seen(self) -> None:
        """The table repeats an observation, even one that no case expects."""
        first = Call("op-a", "weekly", "none", 0, "5\n", "", [(1, "x")] * 2, [])
        following = Call("op-c", "daily", "none", 0, "9\n", "", [(1, "x")], [])
        cells = ["1", "no crash", "new key, other report", "0 -> 0", "2 -> 1", "job 9"]
        self.assertEqual(self.cells(first, following), cells)

    def test_a_row_calls_unclear_what_it_can_not_read(self) -> None:
        """An exit status with no meaning of its own is shown, and called unclear."""
        first, following = altered(altered(CASES[1], 0, exit=1), 1, exit="hung")
        cells = self.cells(first, following)
        self.assertEqual((cells[1], cells[3]), ("unclear", "1 -> hung"))
        self.assertEqual(cells[5], "unclear")

    def test_an_answer_that_is_no_number_stays_out_of_its_row(self) -> None:
        """What a worker prints can't break the table: no number, no job."""
        for answer in ("1\n2\n", "| 1 |", "\xe9", "\xb2", ""):
            first, following = altered(CASES[1], 1, stdout=answer)
            self.assertEqual(self.cells(first, following)[-1], "unclear")

    def test_the_columns_are_aligned(self) -> None:
        """Header, rule and the rows of the five cases have one width."""
        lines = retry_lab.table(CASES).splitlines()
        self.assertEqual({len(line) for line in lines}, {77})
        self.assertEqual((set(lines[1]), lines[1].count("|")), ({"|", "-"}, 7))


if __name__ == "__main__":
    unittest.main()
