"""Can each check of the lab fail, and does each speak only of what it checks?

The judge is a pure function, so it can be handed what no honest worker would produce.
Below are honest observations of the five cases, written by hand; for each check one
observation with that respect altered, and the one complaint it must draw.
"""

import inspect
import re
import sqlite3
import subprocess
import unittest
from contextlib import closing
from unittest import mock

import retry_lab
from retry_lab import CASES, Observation, Reply, Rows

ANSWER_1, ANSWER_2 = Reply(0, "1\n", ""), Reply(0, "2\n", "")
EMPTY = Rows([], [])
ONE = Rows([(1, "weekly")], [("op-a", "weekly", 1)])
TWO = Rows(
    [(1, "weekly"), (2, "weekly")], [("op-a", "weekly", 1), ("op-b", "weekly", 2)]
)
REFUSAL = Reply(20, "key_payload_conflict\n", "")
HONEST = (
    Observation("op-a", "weekly", Reply(17, "", ""), EMPTY, ANSWER_1, ONE),
    Observation("op-a", "weekly", Reply(18, "", ""), ONE, ANSWER_1, ONE),
    Observation("op-b", "weekly", Reply(18, "", ""), ONE, ANSWER_2, TWO),
    Observation("op-a", "daily", Reply(18, "", ""), ONE, REFUSAL, ONE),
    Observation("op-b", "weekly", ANSWER_1, ONE, ANSWER_2, TWO),
)
MOVED = Rows([(2, "weekly")], [("op-a", "weekly", 2)])
CROSSED = [("op-a", "weekly", 2), ("op-b", "weekly", 1)]

# The case, what of its observation is altered, to what; the check that must complain,
# what it expected and what it saw.
ALTERED = (
    (5, "first", {"exit_status": 1}, "first exit status", "0", "1"),
    (2, "first", {"stdout": "1\n"}, "first stdout", "''", r"'1\n'"),
    (5, "first", {"stdout": ""}, "first stdout", r"'1\n'", "''"),
    (2, "first", {"stderr": "?"}, "first stderr", "''", "'?'"),
    (1, "first_rows", {"jobs": [(1, "weekly")]}, "jobs after the first call", "[]",
     "[(1, 'weekly')]"),
    (2, "first_rows", {"jobs": [(1, "daily")]}, "jobs after the first call",
     "[(1, 'weekly')]", "[(1, 'daily')]"),
    (2, "first_rows", {"jobs": [(7, "weekly")]}, "jobs after the first call",
     "[(1, 'weekly')]", "[(7, 'weekly')]"),
    (2, "next", {"exit_status": 18}, "next exit status", "0", "18"),
    (2, "next", {"exit_status": "hung"}, "next exit status", "0", "'hung'"),
    (4, "next", {"exit_status": 0}, "next exit status", "20", "0"),
    (2, "next", {"stdout": "2\n"}, "next stdout", r"'1\n'", r"'2\n'"),
    (3, "next", {"stdout": "1\n"}, "next stdout", r"'2\n'", r"'1\n'"),
    (4, "next", {"stdout": ""}, "next stdout", r"'key_payload_conflict\n'", "''"),
    (2, "next", {"stderr": "\u00e9"}, "next stderr", "''", r"'\xe9'"),
    (2, "next_rows", MOVED._asdict(), "jobs after the next attempt",
     "[(1, 'weekly')]", "[(2, 'weekly')]"),
    (2, "next_rows", {"receipts": ONE.receipts * 2}, "number of receipts", "1", "2"),
    (2, "next_rows", {"receipts": [("op-a", "daily", 1)]}, "receipts without their job",
     "[]", "[('op-a', 'daily', 1)]"),
    (2, "next_rows", {"receipts": [("op-a", "weekly", 7)]}, "receipts without their job",
     "[]", "[('op-a', 'weekly', 7)]"),
    (2, "next_rows", {"receipts": [("op-c", "weekly", 1)]}, "keys with a receipt",
     "['op-a']", "['op-c']"),
    (4, "first_rows", {"receipts": [("op-a", "daily", 1)]}, "rows after the conflict",
     "Rows(jobs=[(1, 'weekly')], receipts=[('op-a', 'daily', 1)])", repr(ONE)),
    (2, "next_rows", {"receipts": [(None, "weekly", 1)]}, "keys with a receipt",
     "['op-a']", "[None]"),
    (5, "next_rows", {"receipts": CROSSED}, "rows as in case 3",
     repr(TWO), repr(TWO._replace(receipts=CROSSED))),
)  # fmt: skip


def altered(number: int, field: str, parts: "dict[str, object]") -> "list[Observation]":
    """Return the honest observations with `parts` of one field of one case altered."""
    seen = list(HONEST)
    value = getattr(seen[number - 1], field)._replace(**parts)
    seen[number - 1] = seen[number - 1]._replace(**{field: value})
    return seen


class Judge(unittest.TestCase):
    def test_the_cases_are_the_five_of_the_table(self) -> None:
        """Each case's first fault and next attempt are those of the README's table."""
        asked = [(case.row, case.fault, case.key, case.report) for case in CASES]
        expected = [
            (1, "before_commit", "op-a", "weekly"),
            (2, "after_commit", "op-a", "weekly"),
            (3, "after_commit", "op-b", "weekly"),
            (4, "after_commit", "op-a", "daily"),
            (5, "none", "op-b", "weekly"),
        ]
        self.assertEqual(asked, expected)

    def test_a_worker_that_does_not_answer_in_time_is_hung(self) -> None:
        """A worker that is killed for being late is hung, with nothing else made up."""
        late = subprocess.TimeoutExpired("worker", 10)
        with mock.patch("subprocess.run", side_effect=late):
            self.assertEqual(retry_lab.call_worker("database"), Reply("hung", "", ""))

    def test_honest_observations_draw_no_complaint(self) -> None:
        """Honest observations of all five cases draw no complaint."""
        self.assertEqual(retry_lab.judge_all(list(HONEST)), [])

    def test_each_check_fails_alone_and_says_what_it_saw(self) -> None:
        """One respect altered, one complaint: case, check, expected and seen."""
        for number, field, parts, check, expected, saw in ALTERED:
            with self.subTest(check, case=number, parts=parts):
                line = f"FAIL case {number}: {check}: expected {expected}, saw {saw}"
                seen = altered(number, field, parts)
                self.assertEqual(retry_lab.judge_all(seen), [line])

    def test_no_check_is_idle(self) -> None:
        """Every check the judge makes has an altered observation that only it catches."""
        # Wrong in every respect that the judge knows of.
        seen = []
        for case in CASES:
            status = case.first.exit_status if case.fault != "none" else 1
            first, following = Reply(status, "x", "x"), Reply(99, "x", "x")
            strays = [("x", "y", case.row), ("z", "y", case.row)]
            rows = Rows([(5, "x")], []), Rows([(9, "x")], strays)
            seen.append(Observation("x", "x", first, rows[0], following, rows[1]))
        # A check could be silent even here, so the judge's own list is read as well.
        listed = re.findall(r'\("([a-z ]+)", ', inspect.getsource(retry_lab.judge))
        made = {line.split(": ")[1] for line in retry_lab.judge_all(seen)}
        self.assertEqual(made, {*listed, "rows as in case 3"})
        self.assertEqual(made, {check for _, _, _, check, _, _ in ALTERED})

    def test_rows_that_can_not_be_read_are_a_complaint(self) -> None:
        """A database that a worker made unreadable is its case's complaint, no crash."""
        with closing(sqlite3.connect(":memory:")) as empty:
            rows = retry_lab.read_rows(empty)
        self.assertEqual(rows, Rows([], [("unreadable", "no such table: jobs", 0)]))
        seen = list(HONEST)
        seen[1] = HONEST[1]._replace(next_rows=rows)
        complaints = retry_lab.judge_all(seen)
        self.assertEqual({line[:12] for line in complaints}, {"FAIL case 2:"})
        self.assertIn("no such table: jobs", "".join(complaints))

    def test_keys_of_different_kinds_are_a_complaint(self) -> None:
        """A receipt without a key beside one with a key is a complaint, and no crash."""
        receipts = [(None, "weekly", 2), ("op-a", "weekly", 1)]
        seen = altered(3, "next_rows", {"receipts": receipts})
        line = "FAIL case 3: keys with a receipt: expected ['op-a', 'op-b'], saw "
        self.assertEqual(retry_lab.judge_all(seen)[0], line + "['op-a', None]")

    def test_a_crossed_receipt_in_either_case_is_seen(self) -> None:
        """Cases 3 and 5 must end in the same rows, whichever of the two went astray."""
        crossed = repr(TWO._replace(receipts=CROSSED))
        line = f"FAIL case 5: rows as in case 3: expected {crossed}, saw {TWO}"
        seen = altered(3, "next_rows", {"receipts": CROSSED})
        self.assertEqual(retry_lab.judge_all(seen), [line])

    def test_a_case_is_judged_by_what_it_says(self) -> None:
        """A refusal that a case spells out itself is a conflict like any other."""
        case = CASES[3]._replace(next=Reply(20, "key_payload_conflict\n", ""))
        first_rows = ONE._replace(receipts=[("op-a", "daily", 1)])
        complaints = retry_lab.judge(case, HONEST[3]._replace(first_rows=first_rows))
        self.assertRegex(complaints[0], "FAIL case 4: rows after the conflict: ")
        # Another exit status, which sorts after 20, is no conflict.
        case = CASES[1]._replace(next=Reply(21, "", ""))
        seen = HONEST[1]._replace(first_rows=first_rows, next=Reply(21, "", ""))
        self.assertEqual(retry_lab.judge(case, seen), [])

    def test_a_first_worker_that_did_not_die_makes_its_case_void(self) -> None:
        """A first worker that did not die where it was told to: void, and no word more."""
        for number, expected, status in (
            (1, 17, 18),
            (2, 18, 17),
            (3, 18, 0),
            (4, 18, "hung"),
        ):
            first, following = Reply(status, "?", "?"), Reply(1, "?", "?")
            wrong = {"first": first, "next": following, "next_rows": EMPTY}
            seen = list(HONEST)
            seen[number - 1] = HONEST[number - 1]._replace(**wrong)
            line = f"VOID case {number}: first exit status: expected {expected}, saw {status!r}"
            self.assertEqual(retry_lab.judge_all(seen), [line])

    def test_a_death_at_the_wrong_place_is_void_even_if_all_else_is_well(self) -> None:
        """The lab does not credit a retry after a death that was not the one asked for."""
        seen = altered(1, "first", {"exit_status": 18})
        line = "VOID case 1: first exit status: expected 17, saw 18"
        self.assertEqual(retry_lab.judge_all(seen), [line])

    def test_a_void_case_hides_no_other_complaint(self) -> None:
        """A void case says nothing of its own retry, and silences no other case."""
        seen = altered(3, "first", {"exit_status": 0})
        seen[4] = altered(5, "next_rows", {"receipts": CROSSED})[4]
        seen[0] = altered(1, "next", {"stdout": "7\n"})[0]
        lines = [line.split(":")[0] for line in retry_lab.judge_all(seen)]
        self.assertEqual(lines, ["FAIL case 1", "VOID case 3"])

    def test_the_expected_answers_lean_on_no_job_count(self) -> None:
        """An answer that happens to equal the job count is still not the right one."""
        seen = altered(3, "next", {"stdout": "1\n"})
        self.assertEqual(len(retry_lab.judge_all(seen)), 1)
        seen = altered(5, "first", {"stdout": "2\n"})
        self.assertEqual(len(retry_lab.judge_all(seen)), 1)


class Printer(unittest.TestCase):
    def cells(self, seen: Observation) -> "list[str]":
        row = retry_lab.table([seen]).splitlines()[2]
        return [cell.strip() for cell in row.strip("|").split("|")]

    def test_a_row_shows_what_was_seen(self) -> None:
        """The table repeats an observation, even one that no case expects."""
        seen = Observation(
            "op-b", "daily", Reply(0, "5\n", ""), TWO, Reply(0, "9\n", ""), ONE
        )
        expected = [
            "1",
            "no crash",
            "new key, other report",
            "0 -> 0",
            "2 -> 1",
            "job 9",
        ]
        self.assertEqual(self.cells(seen), expected)

    def test_a_row_tells_same_from_other_by_value(self) -> None:
        """Same is what reads the same; what sorts before or after it is another."""
        for key, report, sent in (
            # Decoded afresh: equal to the first call's, but not the same objects.
            (b"op-a".decode(), b"weekly".decode(), "same key, same report"),
            ("op-", "wee", "new key, other report"),
            ("op-b", "yearly", "new key, other report"),
        ):
            seen = HONEST[0]._replace(key=key, report=report)
            self.assertEqual(self.cells(seen)[2], sent)

    def test_a_row_calls_unclear_what_it_cannot_read(self) -> None:
        """An exit status with no meaning of its own is shown, and called unclear."""
        silent = Reply("hung", "", "")
        seen = Observation("op-a", "weekly", Reply(1, "", "?"), EMPTY, silent, EMPTY)
        expected = [
            "1",
            "unclear",
            "same key, same report",
            "1 -> hung",
            "0 -> 0",
            "unclear",
        ]
        self.assertEqual(self.cells(seen), expected)

    def test_an_answer_that_is_no_number_stays_out_of_its_row(self) -> None:
        """What a worker prints can't break the table: no number, no job."""
        for answer in ("1\n2\n", "| 1 |", "\xe9", ""):
            seen = HONEST[0]._replace(next=Reply(0, answer, ""))
            self.assertEqual(self.cells(seen)[-1], "unclear")

    def test_the_columns_stay_aligned(self) -> None:
        """Header, rule and rows have one width, whatever they hold."""
        seen = [*HONEST[:4], HONEST[4]._replace(next=Reply(0, "123456789\n", ""))]
        lines = retry_lab.table(seen).splitlines()
        self.assertEqual(len({len(line) for line in lines}), 1)
        self.assertEqual((set(lines[1]), lines[1].count("|")), ({"|", "-"}, 7))


if __name__ == "__main__":
    unittest.main()
