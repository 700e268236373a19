"""Does everything that the README shows really happen, and does all it names exist?"""

import doctest
import os
import re
import shutil
import subprocess
import sys
import unittest
from unittest import defaultTestLoader

from tests.support import LAB, ROOT, LabTest, environment, readme_table

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
HEADINGS = re.findall(r"^#+ (.*)$", PROSE, re.MULTILINE)
END = "-- end of a command --\n"


def commands(block: str) -> "list[tuple[str, str]]":
    """Return the (command, output) pairs of a console block."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2]))


def anchor(heading: str) -> str:
    """Return the fragment that a Markdown host makes of `heading`."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


class Console(LabTest):
    @unittest.skipUnless(os.name == "posix", "a POSIX shell runs the README's commands")
    def test_every_command_prints_what_the_readme_shows(self) -> None:
        """Each console command of the README prints what stands under it."""
        shutil.copy(LAB, self.folder)
        python = self.folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        consoles = [block for kind, block in BLOCKS if kind == "console"]
        shown = [pair for block in consoles for pair in commands(block)]
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

    def test_no_command_of_the_readme_goes_unrun(self) -> None:
        """Shell commands stand in console blocks, but for the one that runs this test."""
        plain = [block for kind, block in BLOCKS if kind in ("sh", "bash", "shell", "")]
        self.assertEqual(plain, ["python -m unittest\n"])
        kinds = {kind for kind, _ in BLOCKS}
        self.assertEqual(kinds, {"sh", "console", "mermaid"})


class Named(unittest.TestCase):
    def test_every_link_leads_somewhere(self) -> None:
        """Every link to a file or a heading of this project resolves."""
        anchors = {anchor(heading) for heading in HEADINGS}
        targets = re.findall(r"\]\(([^)]+)\)", PROSE)
        self.assertGreater(len(targets), 20)
        for target in targets:
            if not target.startswith("https://"):
                path, _, fragment = target.partition("#")
                self.assertTrue((ROOT / path).exists(), target)
                self.assertTrue(not fragment or fragment in anchors, target)

    def test_every_test_file_the_readme_names_exists(self) -> None:
        """Every test file that the README names in its text is there."""
        names = set(re.findall(r"`(?:tests/)?((?:test_|bench)\w+\.py)`", PROSE))
        self.assertLessEqual(
            {"test_lab.py", "test_in_flight.py", "benchmark.py"}, names
        )
        self.assertLessEqual(names, {path.name for path in (ROOT / "tests").iterdir()})

    def test_every_finding_names_a_test_that_exists(self) -> None:
        """Each finding beyond the five cases names a test, in the file it links to."""
        row = r"^\| .* \| .* \| (`.*`) in \[`(test_\w+)\.py`\]\(tests/\2\.py\) \|$"
        rows = readme_table("Beyond the five cases")
        found = re.findall(row, "\n".join(rows), re.MULTILINE)
        self.assertEqual(len(found), len(rows))
        self.assertEqual(len({module for _, module in found}), 6)
        for names, module in found:
            suite = str(list(defaultTestLoader.loadTestsFromName(f"tests.{module}")))
            for name in names.strip("`").split("`, `"):
                self.assertIn(f"testMethod={name}>", suite)


if __name__ == "__main__":
    unittest.main()
