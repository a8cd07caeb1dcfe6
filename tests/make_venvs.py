"""Makes the environments of tests that cannot share ours: ``python tests/make_venvs.py [NAME...]``.

One below ``.venvs/`` for each ``requirements-NAME.txt`` in a folder of tests. One that is complete and whose list has
not changed is left alone; anything else is made anew. Needs a package index; nothing but the standard library here.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).parent
VENVS = HERE.parent / ".venvs"
PREFIX = "requirements-"
MARK = "complete"  # holds what the environment was made from; written last


def main(asked: list[str]) -> int:
    lists = {file.stem.removeprefix(PREFIX): file for file in sorted(HERE.glob(f"*/{PREFIX}*.txt"))}
    unknown = [name for name in asked if name not in lists]
    if unknown:
        print(f"no {PREFIX}{unknown[0]}.txt in a folder here; there are {', '.join(lists)}", file=sys.stderr)
        return 2
    for name in asked or lists:
        make(name, lists[name])
    return 0


def make(name: str, requirements: Path) -> None:
    folder, wanted = VENVS / name, f"{sys.version}\n{hashlib.sha256(requirements.read_bytes()).hexdigest()}\n"
    mark = folder / MARK
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        print(f"{name}: is there", flush=True)
        return
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--requirement", str(requirements)], check=True)
    mark.write_text(wanted, encoding="utf-8")
    print(f"{name}: made in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
