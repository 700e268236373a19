"""How much does the lab cost, next to ten bare interpreter starts?

Run by hand: `python tests/benchmark.py`. The lab's ten workers can't be cheaper than ten
starts of the same Python that import sqlite3 and end, ten in a row from one parent. This
runs both in turn, and prints the median of the ratios, pair by pair, in wall time and in
CPU time. The lab should stay below 1.35 in both.
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
    after = os.times()
    cpu = after[2] + after[3] - before[2] - before[3]  # of children, user and system
    return time.perf_counter() - wall, cpu


if __name__ == "__main__":
    pairs = [(seconds(LAB), seconds("-c", TEN_STARTS)) for _ in range(21)][1:]
    for place, kind in enumerate(("wall", "CPU")):
        ratio = statistics.median(lab[place] / bare[place] for lab, bare in pairs)
        print(f"{kind} time: {ratio:.2f} times ten bare starts")
