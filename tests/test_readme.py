"""Does everything that the pages show really happen, and does all they name exist?"""

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
from tests.experiments import test_ask_a_service
from tests.support import (
    FIRST_JOB,
    LAB,
    ROOT,
    LabTest,
    edits_of,
    environment,
    posix,
    run,
)
from tests.watch import LIMIT, watched

CALLER, EXPERIMENTS = ROOT / "tests" / "caller", ROOT / "tests" / "experiments"
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
    parts = re.split(r"^\$ ((?:.*\\\n)*.*)\n", block, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2]))


def anchors(page: Path) -> "set[str]":
    """Return the fragments that a Markdown host makes of the headings of `page`."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


class Blocks(LabTest):
    @posix
    def test_every_command_prints_what_the_readme_shows(self) -> None:
        shutil.copy(LAB, self.folder)
        (self.folder / "tests" / "experiments").mkdir(parents=True)
        shutil.copy(test_ask_a_service.PROGRAM, self.folder / "tests" / "experiments")
        python = self.folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        shown = [pair for block in blocks("console") for pair in commands(block)]
        # One shell for all, so that `echo $?` sees the command before it.
        report = f"(s=$?; echo '{END.strip()}'; exit $s)"
        script = "".join(f"{command}\n{report}\n" for command, _ in shown)
        ignores, database = test_ask_a_service.ignores, self.new_database()
        with test_ask_a_service.Service(ignores, database) as service:
            here = f"127.0.0.1:{service.server_port}"
            done = subprocess.run(
                ["sh", "-c", script.replace("127.0.0.1:8000", here)],
                cwd=self.folder,
                env=environment(PATH=path),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=LIMIT,
            )
        printed = done.stdout.replace(here, "127.0.0.1:8000").split(END)[:-1]
        self.assertEqual(len(printed), len(shown))
        self.assertGreater(len(shown), 5)
        check = doctest.OutputChecker().check_output
        for (command, expected), got in zip(shown, printed):
            with self.subTest(command):
                self.assertTrue(check(expected, got, doctest.ELLIPSIS), got)

    def test_every_diff_draws_the_complaint_under_it(self) -> None:
        shown = list(zip(blocks("diff"), blocks("text")))
        self.assertEqual(len(shown), 6)
        for diff, complaint in shown:
            with self.subTest(diff):
                done = run(self.edited_lab(*edits_of(diff)))
                self.assertEqual((done.returncode, done.stderr), (1, ""))
                self.assertIn(f"\n{complaint}", done.stdout)
                self.assertNotIn("PASS", done.stdout)

    def test_a_hash_of_the_request_swallows_the_second_wanted_job(self) -> None:
        """Cases 3 and 5 end with one job each; in case 4 the report makes another key."""
        (diff,) = (block for block in blocks("diff") if "crc32" in block)
        table = run(self.edited_lab(*edits_of(diff))).stdout.splitlines()[2:7]
        jobs = [line.split("|")[5].strip() for line in table]
        self.assertEqual(jobs, ["0 -> 1", "1 -> 1", "1 -> 1", "1 -> 2", "1 -> 1"])

    def test_no_block_is_without_a_test(self) -> None:
        """A block of kind mermaid has been rendered and looked at."""
        self.assertEqual(blocks("sh"), ["python -m unittest\n"])  # it runs this test
        self.assertEqual(len(blocks("mermaid")), 1)
        loop, _tool = blocks("python")  # SQL runs in test_postgresql.py
        self.assertEqual(loop, (CALLER / "agent_loop.py").read_text(encoding="utf-8"))
        kinds = {"sh", "console", "mermaid", "python", "diff", "text", "sql"}
        self.assertEqual({kind for kind, _ in BLOCKS}, kinds)

    def test_they_fit_a_narrow_column(self) -> None:
        """Code has at most 60 columns, what a terminal shows 80, a table's row 110."""
        for kind, block in BLOCKS:
            width = 60 if kind in ("python", "sql", "mermaid") else 80
            for line in block.splitlines():
                self.assertLessEqual(len(line), width, line)
        for page in PAGES:
            for line in FENCED.sub("", page.read_text(encoding="utf-8")).splitlines():
                self.assertLessEqual(len(line), 120, line)
                self.assertLessEqual(line.replace("\\|", "").count("|"), 6, line)


class ToolBlock(LabTest):
    def setUp(self) -> None:
        super().setUp()
        self.pasted = self.folder / "pasted.py"
        self.pasted.write_text(blocks("python")[1], encoding="utf-8")

    def test_it_creates_replays_and_rejects_and_leaves_no_file(self) -> None:
        done = run("-W", "error", self.pasted, cwd=self.folder)
        self.assertEqual((done.stdout, done.stderr), ("1\n1\nrejected\n", ""))
        self.assertEqual(os.listdir(self.folder), ["pasted.py"])

    def test_it_takes_the_lab_s_steps_on_the_lab_s_tables(self) -> None:
        """So all that is tested of the lab's create_job holds for it."""
        pasted = runpy.run_path(str(self.pasted))
        theirs = self.new_database("theirs.sqlite", pasted["SCHEMA"])
        ours = self.new_database("ours.sqlite")
        self.assertEqual(self.tables(theirs), self.tables(ours))
        for call in (
            ("op-a", "weekly"),
            ("op-a", "weekly"),
            ("op-a", "daily"),
            ("op-b", 5),
            (b"op-b", "weekly"),
        ):
            steps = self.steps(pasted["create_job"], theirs, *call)
            self.assertEqual(steps, self.steps(retry_lab.create_job, ours, *call))
        self.assertEqual(self.rows(theirs), FIRST_JOB)

    def test_it_works_on_a_table_with_its_columns_in_another_order(self) -> None:
        pasted = runpy.run_path(str(self.pasted))
        turned = "CREATE TABLE receipts (job_id UNIQUE, report, key PRIMARY KEY);"
        database = self.new_database(schema=turned + pasted["SCHEMA"])
        calls = [pasted["create_job"](database, "op-a", "weekly") for _ in range(2)]
        self.assertEqual(calls, [1, 1])

    def tables(self, database: str) -> "list[str]":
        """Return the statements that made the tables, less comments and layout."""
        with closing(sqlite3.connect(database)) as connection:
            made = connection.execute("SELECT sql FROM sqlite_master WHERE sql <> ''")
            plain = [re.sub(r"--.*", "", sql) for (sql,) in made]
        return ["".join(sql.split()) for sql in plain]

    def steps(
        self, create_job: "Callable[..., int]", *call: object
    ) -> "tuple[object, list[str]]":
        """Return how a call ends, and the statements it ran."""
        ran: list[str] = []
        with watched(ran.append):
            try:
                end: object = create_job(*call)
            except (ValueError, TypeError) as error:
                end = type(error).__name__
        return end, ran


class Named(unittest.TestCase):
    def test_every_link_leads_somewhere(self) -> None:
        """Every link to a file or a heading of this project."""
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

    def test_every_experiment_is_listed_with_its_question(self) -> None:
        listed = " ".join(PAGES[1].read_text(encoding="utf-8").split())
        rows = re.findall(r"- \*\*([^*]*)\*\* [^*]*\. \[`(\w+\.py)`\]", listed)
        questions = {file: question for question, file in rows}
        paths = [*EXPERIMENTS.glob("test_*.py"), *CALLER.glob("test_*.py")]
        for path in (*paths, ROOT / "tests" / "test_service.py"):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            self.assertEqual(questions.pop(path.name), docstring.splitlines()[0])
            self.assertIn("\nCrash model: ", docstring)
            self.assertIn("\nFound: ", docstring)
        self.assertEqual(questions, {})

    def test_the_workflow_runs_the_two_commands(self) -> None:
        workflow = ROOT / ".github" / "workflows" / "ci.yml"
        ran = re.findall(r"- run: (.*)", workflow.read_text(encoding="utf-8"))
        self.assertEqual(ran, ["python retry_lab.py", "python -m unittest"])


if __name__ == "__main__":
    unittest.main()
