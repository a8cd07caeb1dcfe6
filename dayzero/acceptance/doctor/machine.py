"""What this machine has, and what of it a model would miss. Facts are gathered apart from what is made of them.

torch is asked in a process of its own: a build that does not fit the machine can end a process, or hang in a driver.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import dayzero
from dayzero.errors import MachineError
from dayzero.finding import Finding
from dayzero.planner.memory import available_bytes
from dayzero.units import GIB, MIB, bytes_text

PROBE_SECONDS = 120.0
LEAST_MEMORY, ENOUGH_MEMORY = 512 * MIB, 4 * GIB  # torch alone takes the first; a small model and its cache the second
LEAST_DISK, ENOUGH_DISK = 512 * MIB, 5 * GIB  # kernels and logs; the demo's model and a record with it
FEW_FILES = 1024  # each connection is one, each shard of a checkpoint another
DRIVER = Path("/proc/driver/nvidia/version")
PROBE = """
import json
out = {}
import torch
out["torch"] = torch.__version__
out["cuda_build"] = torch.version.cuda
out["available"] = torch.cuda.is_available()
try:
    import triton
    out["triton"] = triton.__version__
except ImportError:
    out["triton"] = None
if out["available"]:
    out["archs"] = torch.cuda.get_arch_list()
    out["devices"] = []
    for at in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(at)
        name, capability = torch.cuda.get_device_name(at), list(torch.cuda.get_device_capability(at))
        out["devices"].append({"name": name, "capability": capability, "free": free, "total": total})
    ones = torch.ones(64, 64, device="cuda")
    out["product"] = float((ones @ ones).sum())
else:
    ones = torch.ones(64, 64)
    out["product"] = float((ones @ ones).sum())
print("FACTS " + json.dumps(out))
"""


@dataclass(frozen=True)
class Look:
    """What was seen. packages: (name, least version, what is installed or None). torch: what the probe found; None:
    torch_problem says why. driver: NVIDIA's, by its own word; None where there is none. compiler: path of a C++
    compiler, or None. disks: (what for, folder, free bytes). port: (number, whether it is free)."""

    python: tuple[int, ...]
    packages: tuple[tuple[str, str, str | None], ...]
    torch: Mapping[str, Any] | None
    torch_problem: str = ""
    driver: str | None = None
    compiler: str | None = None
    compiler_problem: str = ""
    available_bytes: int = 0
    disks: tuple[tuple[str, str, int], ...] = ()
    port: tuple[int, bool] = (8000, True)
    open_files: int = 1 << 20
    free_devices: tuple[int, ...] = field(default=())


def look_here(folders: Sequence[tuple[str, Path]], port: int = 8000) -> Look:
    """This machine, now. folders: (what for, where) that are written to."""
    facts, problem = ask_torch()
    compiler, why = _compiler()
    devices = (facts or {}).get("devices") or ()
    return Look(
        tuple(sys.version_info[:3]),
        tuple(_packages()),
        facts,
        problem,
        _driver(),
        compiler,
        why,
        available_bytes(),
        tuple((what, str(place), free) for what, folder in folders for place, free in _free(folder)),
        (port, _is_free(port)),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        tuple(device["free"] for device in devices),
    )


def ask_torch(program: str = PROBE, seconds: float = PROBE_SECONDS) -> tuple[dict[str, Any] | None, str]:
    """(facts, "") of the torch that this interpreter imports, or (None, why there are none). Starts a process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"it was not there after {seconds:.0f} s; a driver may hang"
    except OSError as error:
        return None, f"no second Python could be started: {error.strerror or error}"
    said = done.stdout.decode("utf-8", "replace")
    found = next((line for line in said.splitlines() if line.startswith("FACTS ")), None)
    if done.returncode == 0 and found is not None:
        return dict(json.loads(found.removeprefix("FACTS "))), ""
    if done.returncode < 0:
        return None, f"the process was ended by signal {-done.returncode} while it was asked"
    last = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return None, last[-1].strip() if last else f"the process ended with {done.returncode} and said nothing"


def _packages() -> Iterable[tuple[str, str, str | None]]:
    """What the package itself says it needs, and what is there."""
    try:
        wanted = requires(dayzero.__name__) or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return
    for line in wanted:
        found = re.match(r"^([A-Za-z0-9._-]+)(?:\[[^]]*])?\s*(?:>=\s*([\w.]+))?", line)
        if found is None or "extra ==" in line:
            continue
        try:
            yield found[1], found[2] or "0", version(found[1])
        except PackageNotFoundError:
            yield found[1], found[2] or "0", None


def _driver() -> str | None:
    try:
        text = DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.[\d.]+)\b", text)
    return found[1] if found else text.splitlines()[0][:80] if text else "unknown"


def _compiler() -> tuple[str | None, str]:
    from dayzero.ops.native.build import find_compiler

    try:
        return find_compiler(), ""
    except MachineError as error:
        return None, str(error)


def _free(folder: Path) -> Iterable[tuple[Path, int]]:
    """The folder, or the nearest above it that exists, with what is free there."""
    place = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if place is not None:
        yield folder, shutil.disk_usage(place).free if os.access(place, os.W_OK) else -1


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# --- what is made of it ----------------------------------------------------------------------------------------------


def machine_findings(look: Look) -> list[Finding]:
    """What the machine has and lacks; layers hardware and compiler."""
    return [
        _installed(look),
        *_torch(look),
        _device(look),
        _compilers(look),
        *_room(look),
        *_server(look),
    ]


def _is(layer: str, kind: str, claim: str, measured: Any) -> Finding:
    return Finding(f"machine.{kind}", layer, "pass", claim, measured)


def _installed(look: Look) -> Finding:
    claim = "every package that dayzero needs is installed, and new enough"
    bad = [f"{name} {have or 'is missing'}" + (f", needs {least}" if have else "")
           for name, least, have in look.packages if have is None or numbers_of(have) < numbers_of(least)]  # fmt: skip
    if not bad:
        return _is(
            "hardware", "packages", claim, f"{len(look.packages)} packages, Python {'.'.join(map(str, look.python))}"
        )
    return Finding(
        "machine.packages",
        "hardware",
        "fail",
        claim,
        f"{len(bad)} are not",
        0,
        tuple(bad),
        "pip install --upgrade dayzero, in the environment of " + sys.executable,
    )


def numbers_of(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:4])


def _torch(look: Look) -> Iterable[Finding]:
    claim = "torch can be imported, and multiplies"
    if look.torch is None:
        yield Finding(
            "machine.torch",
            "hardware",
            "fail",
            claim,
            look.torch_problem,
            "no error",
            (sys.executable,),
            "Install torch anew for this machine; on one with a GPU, a build that its driver can run.",
        )
        return
    product = look.torch.get("product")
    if product != 64.0**3:
        yield Finding(
            "machine.torch",
            "hardware",
            "fail",
            claim,
            product,
            64.0**3,
            (str(look.torch.get("torch")),),
            "This device computes wrongly: take it out of service, or try another build of torch.",
        )
        return
    yield _is("hardware", "torch", claim, f"torch {look.torch.get('torch')}")
    if look.torch.get("available"):
        triton = look.torch.get("triton")
        yield (
            _is("compiler", "triton", "Triton is there to compile kernels for the GPU", triton)
            if triton
            else Finding(
                "machine.triton",
                "compiler",
                "note",
                "Triton is there to compile kernels for the GPU",
                "it is not installed",
                remedy="pip install triton; without it references run, which are slow.",
            )
        )


def _device(look: Look) -> Finding:
    claim = "torch sees the accelerator that is here"
    facts = look.torch or {}
    if facts.get("available"):
        devices = facts.get("devices") or []
        archs = set(facts.get("archs") or ())
        odd = [d["name"] for d in devices if archs and not _built_for(tuple(d["capability"]), archs)]
        names = tuple(f"{d['name']}, {bytes_text(d['free'])} free of {bytes_text(d['total'])}" for d in devices)
        if odd:
            return Finding(
                "machine.device",
                "hardware",
                "fail",
                "torch is built for the GPUs that are here",
                ", ".join(odd),
                f"one of {', '.join(sorted(archs))}",
                names,
                "Install a build of torch for this GPU, or run with --device cpu.",
            )
        return Finding("machine.device", "hardware", "pass", claim, f"{len(devices)}", evidence=names)
    if look.driver is None:
        return Finding(
            "machine.device", "hardware", "not applicable", claim, "no NVIDIA driver is loaded: the CPU is used"
        )
    build = facts.get("cuda_build")
    why = f"torch is built for CUDA {build}, and sees none" if build else "this torch is built for CPUs alone"
    return Finding(
        "machine.device",
        "hardware",
        "fail",
        claim,
        why,
        f"the GPU of driver {look.driver}",
        (f"driver {look.driver}", f"torch {facts.get('torch', 'unknown')}"),
        "Install a build of torch for a CUDA that this driver runs; in a container, hand the GPU in. "
        "To go without: --device cpu.",
    )


def _built_for(capability: tuple[int, ...], archs: set[str]) -> bool:
    """Code for sm_XY runs on devices of the same major number and at least that minor one; compute_XY on later ones."""
    own = capability[0] * 10 + capability[1]
    for arch in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)[a-z]?", arch)
        if found and (
            own >= int(found[2]) if found[1] == "compute" else 0 <= own - int(found[2]) < 10 - int(found[2]) % 10
        ):
            return True
    return False


def _compilers(look: Look) -> Finding:
    claim = "there is a C++ compiler for kernels that are built here"
    if look.compiler is not None:
        return _is("compiler", "compiler", claim, look.compiler)
    return Finding(
        "machine.compiler",
        "compiler",
        "note",
        claim,
        look.compiler_problem or "none",
        evidence=("PATH",),
        remedy="apt-get install g++, or another compiler; without it the references run, which are slow.",
    )


def _room(look: Look) -> Iterable[Finding]:
    free = look.available_bytes
    yield _amount(
        "memory",
        "there is memory free to run a small model",
        free,
        LEAST_MEMORY,
        ENOUGH_MEMORY,
        (),
        "Close other programs, or raise the container's limit.",
    )
    for what, folder, bytes_free in look.disks:
        claim = f"there is room on the disk for {what}"
        if bytes_free < 0:
            yield Finding(
                "machine.disk",
                "hardware",
                "fail",
                f"{what} can be written",
                "not writable",
                None,
                (folder,),
                f"Give this user the right to write to {folder}, or choose another folder.",
            )
        else:
            yield _amount("disk", claim, bytes_free, LEAST_DISK, ENOUGH_DISK, (folder,), f"Free some room at {folder}.")


def _amount(
    kind: str, claim: str, free: int, least: int, enough: int, evidence: tuple[str, ...], remedy: str
) -> Finding:
    if free >= enough:
        return Finding(f"machine.{kind}", "hardware", "pass", claim, bytes_text(free), evidence=evidence)
    verdict, bound = ("fail", least) if free < least else ("note", enough)
    return Finding(f"machine.{kind}", "hardware", verdict, claim, bytes_text(free), bytes_text(bound), evidence, remedy)  # type: ignore[arg-type]


def _server(look: Look) -> Iterable[Finding]:
    number, is_free = look.port
    claim = f"port {number} is free for a server"
    if is_free:
        yield _is("server", "port", claim, "free")
    else:
        yield Finding(
            "machine.port",
            "server",
            "note",
            claim,
            "another program listens there",
            "free",
            (f"127.0.0.1:{number}",),
            "Give dayzero serve another --port; 0 takes a free one.",
        )
    claim = "a process may have enough files and connections open"
    if look.open_files >= FEW_FILES:
        yield _is("hardware", "files", claim, look.open_files)
    else:
        yield Finding(
            "machine.files",
            "hardware",
            "note",
            claim,
            look.open_files,
            FEW_FILES,
            ("RLIMIT_NOFILE",),
            f"ulimit -n {FEW_FILES} or more, in the shell that starts the server.",
        )
