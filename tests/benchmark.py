"""How much does the lab cost, next to ten bare interpreter starts?

Run by hand: `python tests/benchmark.py [ROUNDS]`. The lab's ten workers can't be cheaper
than ten starts of the same Python that import sqlite3 and end, ten in a row from one
parent; this runs both in turn and prints both medians, in seconds, and their ratio.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

LAB = str(Path(__file__).resolve().parent.parent / "retry_lab.py")
TEN_STARTS = """
import subprocess, sys
for _ in range(10):
    command = [sys.executable, "-I", "-S", "-c", "import sqlite3"]
    subprocess.run(command, check=True, capture_output=True)
"""


def seconds(*arguments: str) -> float:
    """Run Python on `arguments`; return the seconds it took."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def main(rounds: int) -> None:
    """Time both commands in turn, `rounds` times after one to warm up; print medians."""
    pairs = [(seconds(LAB), seconds("-c", TEN_STARTS)) for _ in range(rounds + 1)][1:]
    lab, starts = (statistics.median(column) for column in zip(*pairs))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"Python {sys.version.split()[0]}, {rounds} rounds, medians")
    print(
        f"the lab {lab:.3f} s, ten bare starts {starts:.3f} s, pair by pair {ratio:.2f}"
    )


if __name__ == "__main__":
    main(max(1, int(sys.argv[1])) if len(sys.argv) > 1 else 20)
