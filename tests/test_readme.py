"""Does everything that the README shows really happen?"""

import doctest
import os
import re
import shutil
import subprocess
import sys
import unittest

from tests.support import LAB, ROOT, LabTest, environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
END = "-- end of a command --\n"


def commands(block: str) -> "list[tuple[str, str]]":
    """Return the (command, output) pairs of a console block."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2]))


class Console(LabTest):
    @unittest.skipUnless(
        os.name == "posix", "the README's commands are run by a POSIX shell"
    )
    def test_every_command_prints_what_the_readme_shows(self) -> None:
        """Each console command of the README, run in turn, prints what stands under it."""
        shutil.copy(LAB, self.folder)
        python = self.folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        shown = [
            pair
            for kind, block in BLOCKS
            if kind == "console"
            for pair in commands(block)
        ]
        # One shell for all, so that `echo $?` sees the command before it.
        script = "".join(
            f"{line}\n(s=$?; echo '{END.strip()}'; exit $s)\n" for line, _ in shown
        )
        done = subprocess.run(
            ["sh", "-c", script],
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


if __name__ == "__main__":
    unittest.main()
