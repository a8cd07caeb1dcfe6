"""Compiles ``kernels.cpp`` with the system's compiler, once for each machine and source, and loads it.

The library is linked against the OpenMP runtime that torch has loaded already, so that both share one pool of threads.
It is kept in the user's cache folder under a name made of everything it depends on.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch  # noqa: F401 - brings the OpenMP runtime

from dayzero.errors import MachineError
from dayzero.ops.kernel_cache import own_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
INCLUDED = (Path(__file__).with_name("dots.h"),)
COMPILERS = ("g++", "c++", "clang++")  # the planner's feature ``cxx`` means that one of these is there
# No -ffast-math: masks are infinities, and a NaN must stay one.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-w")
TIMEOUT_S = 600  # some 11 s of processor time; a loaded machine may take minutes
_OPENMP = re.compile(r"/lib(?:g|i)?omp[^/]*\.so[^/]*$")


class NoRoom(MachineError):
    """The compiler had no space to write to."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The kernels for this machine, compiled if need be. Raises MachineError saying what is lacking."""
    return load(())


def load(defines: tuple[str, ...], cache: Path | None = None) -> ctypes.CDLL:
    """The kernels compiled with ``-D`` for each of ``defines``, from ``cache`` (default: the user's) when there.

    Raises MachineError when there is no compiler, no OpenMP runtime, or the compiler fails.
    """
    compiler, runtime = find_compiler(), find_openmp()
    flags = (*FLAGS, *(f"-D{define}" for define in defines))
    name = f"kernels-{_key(compiler, runtime, flags)}.so"
    folder = own_folder("native", cache)
    if folder is None:  # no folder of this user's own: a shared one would let others plant a library
        return _load_once(name, compiler, runtime, flags)
    path = folder / name
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # cut short, as when the machine went down behind the rename: made again
    try:
        return ctypes.CDLL(str(compile_into(path, compiler, runtime, flags)))
    except (OSError, NoRoom):  # full, or read-only after all
        return _load_once(name, compiler, runtime, flags)


def _load_once(name: str, compiler: str, runtime: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The kernels by way of a temporary folder, for this process alone."""
    try:
        with tempfile.TemporaryDirectory(prefix="dayzero-") as private:
            return ctypes.CDLL(str(compile_into(Path(private) / name, compiler, runtime, flags)))
    except OSError as error:
        raise MachineError(
            f"the native_cpu operators cannot be compiled here: {error.strerror or error} (in {_temporary()}); free "
            "some space there, set TMPDIR to another folder, or bind other variants."
        ) from error


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "any folder for temporary files"


def find_compiler() -> str:
    """Path of a C++ compiler; MachineError when there is none."""
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise MachineError(
        f"the native_cpu operators need a C++ compiler, but none of {', '.join(COMPILERS)} is on the PATH: "
        "install one, or bind other variants."
    )


def find_openmp() -> Path:
    """The OpenMP runtime this process has loaded (torch brings one); MachineError when there is none."""
    maps = Path("/proc/self/maps")  # of this process; importing torch has loaded its runtime
    for line in maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []:
        place = line[line.find("/") :] if "/" in line else ""
        if _OPENMP.search(place):
            return Path(place)
    raise MachineError(
        "the native_cpu operators share the OpenMP runtime of torch, but this process has none loaded: "
        "use a build of torch with OpenMP on Linux, or bind other variants."
    )


def compile_into(path: Path, compiler: str, runtime: Path, flags: tuple[str, ...]) -> Path:
    """Write the shared library ``path``, whole or not at all, and return it. Raises MachineError."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
        compiled, linked = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        _run([compiler, *flags, "-c", str(SOURCE), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), str(runtime), "-o", str(linked)])
        os.replace(linked, path)
    return path


def _run(command: list[str]) -> str:
    """What the command printed. Raises MachineError when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"the native_cpu operators cannot be compiled here: {command[0]}: {error}.") from error
    if done.returncode and os.strerror(errno.ENOSPC) in done.stderr:
        raise NoRoom(
            f"the native_cpu operators cannot be compiled here: {command[0]} found no space left in {_temporary()} or "
            "in the folder for kernels; free some, or set TMPDIR to another folder."
        )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise MachineError(f"the native_cpu operators cannot be compiled here: {command[0]} says: {said}")
    return done.stdout


def _key(compiler: str, runtime: Path, flags: tuple[str, ...]) -> str:
    """Hash of all that the library depends on: source, compiler, flags, runtime, and what -march=native sees."""
    version = _run([compiler, "--version"])
    sources = (path.read_text(encoding="utf-8") for path in (SOURCE, *INCLUDED))
    parts = (*sources, compiler, version, str(runtime), *flags, cpu_flags())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def cpu_flags() -> str:
    """Model and flags of the first processor, as the kernel lists them; empty where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    first = text.split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.partition(":")[0].strip() in wanted)
