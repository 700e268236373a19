"""How much does the lab cost, next to ten bare interpreter starts?

Run by hand: `python tests/benchmark.py [ROUNDS]`. The lab's ten workers can't be cheaper
than ten starts of the same Python that import sqlite3 and end, ten in a row from one
parent. This runs both in turn, and prints medians in wall time and in CPU time, and the
median of the ratios pair by pair. The lab should stay below 1.35 in both.
"""

import os
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


def seconds(*arguments: str) -> "tuple[float, float]":
    """Run Python on `arguments`; return the wall and the CPU seconds it took."""
    wall, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - wall, os.times()
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return wall, user + system


def main(rounds: int) -> None:
    """Time both commands in turn, `rounds` times after one to warm up; print medians."""
    pairs = [(seconds(LAB), seconds("-c", TEN_STARTS)) for _ in range(rounds + 1)][1:]
    print(f"Python {sys.version.split()[0]}, {rounds} rounds, medians")
    for place, kind in enumerate(("wall", "CPU")):
        lab = [of_lab[place] for of_lab, _ in pairs]
        starts = [of_starts[place] for _, of_starts in pairs]
        ratio = statistics.median(a / b for a, b in zip(lab, starts))
        print(
            f"{kind}: the lab {statistics.median(lab):.3f} s, "
            f"ten bare starts {statistics.median(starts):.3f} s, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main(max(1, int(sys.argv[1])) if len(sys.argv) > 1 else 20)
