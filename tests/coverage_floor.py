"""Ends with 1 if fewer than 95 % of lines or 90 % of branches were run by the tests.

coverage combine && python tests/coverage_floor.py
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

FLOORS = {"lines": 95.0, "branches": 90.0}


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(path)]
        subprocess.run(command, check=True)
        totals = json.loads(path.read_text())["totals"]
    lines = 100.0 * totals["covered_lines"] / totals["num_statements"]
    branches = 100.0 * totals["covered_branches"] / totals["num_branches"]
    found = {"lines": lines, "branches": branches}
    for name, floor in FLOORS.items():
        print(f"{name}: {found[name]:.1f} % covered, at least {floor:.0f} % wanted")
    sys.exit(any(found[name] < floor for name, floor in FLOORS.items()))


if __name__ == "__main__":
    main()
