"""Does everything that the two READMEs show really happen, and does all they name exist?"""

import ast
import doctest
import os
import re
import runpy
import shutil
import sqlite3
import subprocess
import sys
import unittest
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import retry_lab
from tests.experiments import runner
from tests.support import FIRST_JOB, LAB, ROOT, LabTest, environment, posix
from tests.test_rules import BROKEN
from tests.watch import watched

EXPERIMENTS = ROOT / "tests" / "experiments"
PAGES = (ROOT / "README.md", EXPERIMENTS / "README.md")
README = PAGES[0].read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = FENCED.findall(README)
END = "-- end of a command --\n"


def blocks(kind: str) -> "list[str]":
    """Return the blocks of the README that are of `kind`."""
    return [block for of_kind, block in BLOCKS if of_kind == kind]


def commands(block: str) -> "list[tuple[str, str]]":
    """Return the (command, output) pairs of a console block."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2]))


def anchors(page: Path) -> "set[str]":
    """Return the fragments that a Markdown host makes of the headings of `page`."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


class Console(LabTest):
    @posix
    def test_every_command_prints_what_the_readme_shows(self) -> None:
        """Each console command of the README prints what stands under it."""
        shutil.copy(LAB, self.folder)
        python = self.folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        shown = [pair for block in blocks("console") for pair in commands(block)]
        # One shell for all, so that `echo $?` sees the command before it.
        report = f"(s=$?; echo '{END.strip()}'; exit $s)"
        done = subprocess.run(
            ["sh", "-c", "".join(f"{command}\n{report}\n" for command, _ in shown)],
            cwd=self.folder,
            env=environment(PATH=path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed = done.stdout.split(END)[:-1]
        self.assertEqual(len(printed), len(shown))
        self.assertGreater(len(shown), 5)
        check = doctest.OutputChecker().check_output
        for (command, expected), got in zip(shown, printed):
            with self.subTest(command):
                self.assertTrue(check(expected, got, doctest.ELLIPSIS), got)

    def test_no_block_of_the_readme_is_without_a_test(self) -> None:
        """Each kind of block has a test; the one plain command runs this very test."""
        self.assertEqual(blocks("sh"), ["python -m unittest\n"])
        # mermaid has been rendered and looked at; sql runs in test_postgresql.py.
        kinds = {"sh", "console", "mermaid", "python", "diff", "text", "sql"}
        self.assertEqual({kind for kind, _ in BLOCKS}, kinds)


class BlockToPaste(LabTest):
    def setUp(self) -> None:
        super().setUp()
        (self.block,) = blocks("python")
        (self.folder / "pasted.py").write_text(self.block, encoding="utf-8")

    def test_it_fits_a_narrow_column(self) -> None:
        """No line of it is wider than 64 columns."""
        self.assertLessEqual(max(map(len, self.block.splitlines())), 64)

    def test_eight_processes_that_run_it_at_once_make_one_job(self) -> None:
        """As pasted, and run by eight processes at once, it makes one job and replays."""
        words = [sys.executable, "pasted.py"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [
            subprocess.Popen(words, cwd=self.folder, **streams) for _ in range(8)
        ]
        ends = [process.communicate() for process in started]
        self.assertEqual(ends, [("1\n1\n", "")] * 8)
        self.assertEqual(self.rows(str(self.folder / "jobs.sqlite")), FIRST_JOB)

    def test_its_sql_is_the_lab_s(self) -> None:
        """It makes the lab's tables, and takes the lab's steps in each of three ways."""
        # Its definitions, without the lines at its end that call them.
        definitions = self.folder / "definitions.py"
        definitions.write_text(self.block.split("\nsqlite3.connect", 1)[0])
        pasted = runpy.run_path(str(definitions))
        theirs = self.new_database("theirs.sqlite", pasted["SCHEMA"])
        ours = self.new_database("ours.sqlite")
        self.assertEqual(self.tables(theirs), self.tables(ours))
        for key, report in (("op-a", "weekly"), ("op-a", "weekly"), ("op-a", "daily")):
            steps = self.steps(pasted["create_job"], theirs, key, report)
            self.assertEqual(steps, self.steps(retry_lab.create_job, ours, key, report))
        self.assertEqual(self.rows(theirs), FIRST_JOB)

    def tables(self, database: str) -> "list[str]":
        """Return the statements that made the tables, less comments and layout."""
        with closing(sqlite3.connect(database)) as connection:
            made = connection.execute("SELECT sql FROM sqlite_master WHERE sql <> ''")
            plain = [re.sub(r"--.*", "", sql) for (sql,) in made]
        return ["".join(sql.split()) for sql in plain]

    def steps(
        self, create_job: "Callable[..., int]", *call: str
    ) -> "tuple[object, list[str]]":
        """Return how a call ends, and the statements it ran."""
        ran: list[str] = []
        with watched(ran.append):
            try:
                end: object = create_job(*call)
            except ValueError:
                end = "rejected"
        return end, ran


class BreakIt(unittest.TestCase):
    def test_every_diff_draws_the_complaint_under_it(self) -> None:
        """What the README says a diff draws is what test_rules.py sees it draw."""
        shown = list(zip(blocks("diff"), blocks("text")))
        self.assertGreater(len(shown), 4)
        seen = [
            (broken.diff.lstrip("\n"), broken.complaint + "\n") for broken in BROKEN
        ]
        for pair in shown:
            self.assertIn(pair, seen)

    def test_they_fit_a_terminal(self) -> None:
        """No line of a diff, a complaint or a command's output is over 80 columns."""
        for block in blocks("diff") + blocks("text") + blocks("console"):
            for line in block.splitlines():
                if not line.startswith("$ "):
                    self.assertLessEqual(len(line), 80, line)


class Told(unittest.TestCase):
    def test_the_texts_for_the_model_are_the_runner_s(self) -> None:
        """The texts that the README shows are what the worked code says."""
        done = runner.OUTCOMES["answered"].format(answer="job 1")
        texts = (
            runner.DONE.format(answer="job 1"),
            runner.DONE_EARLIER.format(answer="job 1"),
            runner.REJECTED.format(answer="too long"),
            runner.UNKNOWN,
            runner.NOT_SENT.format(request="weekly", outcome=done),
            runner.NOT_SENT_YET.format(request="weekly"),
        )
        shown = " ".join(README.split())
        for text in texts:
            self.assertIn(f'- "{text}"', shown)


class Named(unittest.TestCase):
    def test_every_link_leads_somewhere(self) -> None:
        """Every link to a file or a heading of this project resolves."""
        for page in PAGES:
            prose = FENCED.sub("", page.read_text(encoding="utf-8"))
            targets = re.findall(r"\]\(([^)]+)\)", prose)
            targets += re.findall(r"^\[\w+\]: (.*)$", prose, re.MULTILINE)
            self.assertGreater(len(targets), 6)
            for target in targets:
                if target.startswith("https://"):
                    continue
                name, _, fragment = target.partition("#")
                path = (page.parent / name).resolve() if name else page
                self.assertTrue(path.exists(), target)
                if fragment:
                    self.assertIn(fragment, anchors(path), target)

    def test_every_file_that_a_page_names_exists(self) -> None:
        """Every Python file that a page names in its text is there."""
        there = {path.name for path in ROOT.rglob("*.py")}
        for page in PAGES:
            prose = FENCED.sub("", page.read_text(encoding="utf-8"))
            named = set(re.findall(r"(\w+\.py)\b", prose))
            self.assertLessEqual(named, there)

    def test_every_experiment_is_listed_with_its_question(self) -> None:
        """The list has each experiment, with the question that its docstring asks."""
        listed = " ".join(PAGES[1].read_text(encoding="utf-8").split())
        rows = re.findall(
            r"- \*\*([^*]*)\*\* [^*]*\. \[`(test_\w+\.py)`\]\(\2\)", listed
        )
        questions = {file: question for question, file in rows}
        for path in EXPERIMENTS.glob("test_*.py"):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            self.assertEqual(questions.pop(path.name), docstring.splitlines()[0])
            self.assertIn("\nCrash model: ", docstring)
            self.assertIn("\nFound: ", docstring)
        self.assertEqual(questions, {})

    def test_no_row_of_a_table_is_cut_off(self) -> None:
        """No row of a table is wider than 110 columns."""
        for page in PAGES:
            for line in page.read_text(encoding="utf-8").splitlines():
                if line.startswith("|"):
                    self.assertLessEqual(len(line), 110, line)

    def test_the_workflow_runs_the_two_commands(self) -> None:
        """The workflow runs the README's two commands, and no other."""
        workflow = ROOT / ".github" / "workflows" / "ci.yml"
        text = workflow.read_text(encoding="utf-8")
        ran = re.findall(r"- run: (.*)", text)
        self.assertEqual(ran, ["python retry_lab.py", "python -m unittest"])


if __name__ == "__main__":
    unittest.main()
