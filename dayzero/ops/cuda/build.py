"""From a ``.cu`` file to a function that launches its kernel: NVRTC, a cache of what it made, and a launch.

The packages ``cuda.bindings`` and the NVRTC library come with CUDA builds of torch. Sources may include the headers of
CUDA's own toolkit only where NVRTC has them built in (``cuda_bf16.h`` and ``cuda_fp8.h`` come with torch's packages).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dayzero.errors import MachineError
from dayzero.ops.kernel_cache import own_folder

HERE = Path(__file__).parent
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER, _SERIALIZATION = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, …_PROGRAMMATIC_STREAM_SERIALIZATION
_MORE: list[str] = []  # of ``compiled_with``


def check_machine() -> None:
    """Raise MachineError where CUDA C++ cannot be compiled and run."""
    if not torch.cuda.is_available():
        raise MachineError("variants in CUDA C++ need an NVIDIA GPU, and torch sees none; bind others to these sites")
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        raise MachineError(f"variants in CUDA C++ need the package cuda-bindings ({error}); pip install it") from error


class Kernel:
    """One compiled kernel on the current device. Keeps its module loaded."""

    def __init__(self, image: bytes, name: str, shared_bytes: int) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # the context exists from here on
        self.shared_bytes = shared_bytes
        self._module = _ok(driver.cuModuleLoadData(image))
        self.function = _ok(driver.cuModuleGetFunction(self._module, name.encode()))
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute(_DYNAMIC_SHARED)
            _ok(driver.cuFuncSetAttribute(self.function, attribute, shared_bytes))

    def __call__(
        self,
        grid: Sequence[int],
        threads: int,
        arguments: Sequence[Tensor | int | float | ctypes.Structure | None],
        *,
        cluster: int = 1,
        overlap: bool = False,
    ) -> None:
        """Launch on torch's current stream. Tensors are passed as pointers (None as a null pointer), int as int32,
        float as float32; for other widths pass the ctypes value itself (``ctypes.c_int64(x)``).

        cluster: blocks along x that form a cluster. overlap: the kernel may begin before the one ahead of it in the
        stream has ended (programmatic dependent launch); it then must call ``griddepcontrol.wait`` before it touches
        what that one writes.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        attributes = []
        if cluster > 1:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID(_CLUSTER)
            one.value.clusterDim.x, one.value.clusterDim.y, one.value.clusterDim.z = cluster, 1, 1
            attributes.append(one)
        if overlap:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID(_SERIALIZATION)
            one.value.programmaticStreamSerializationAllowed = 1
            attributes.append(one)
        config.attrs, config.numAttrs = attributes, len(attributes)
        values, pointers = _packed(arguments)
        _ok(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))
        del values


@contextmanager
def compiled_with(*options: str) -> Iterator[None]:
    """Kernels that are loaded inside are compiled with these options too, such as ``-DSYNC_BOTH=1``: for checks and
    comparisons. A variant that keeps its kernel keeps the one it has."""
    before = len(_MORE)
    _MORE.extend(options)
    try:
        yield
    finally:
        del _MORE[before:]


def load(source: str, name: str, *, defines: Mapping[str, object], shared_bytes: int = 0) -> Kernel:
    """The ``extern "C"`` kernel ``name`` of the file ``source`` beside this one, compiled for the current device with
    ``-DKEY=VALUE`` for each define. Compiled once a process, device and set of defines, and kept on disk."""
    settings = tuple(sorted((key, str(value)) for key, value in defines.items()))
    return _load(source, name, settings, tuple(_MORE), shared_bytes, torch.cuda.current_device())


@cache
def _load(
    source: str, name: str, defines: tuple[tuple[str, str], ...], more: tuple[str, ...], shared_bytes: int, device: int
) -> Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    suffix = "a" if major >= 9 else ""
    options = [f"--gpu-architecture=sm_{major}{minor}{suffix}", "--std=c++17", "-default-device"]
    options += [*(f"-D{key}={value}" for key, value in defines), *more]
    return Kernel(compiled(source, options), name, shared_bytes)


def compiled(source: str, options: Sequence[str]) -> bytes:
    """The cubin of a file beside this one, from the cache or made now."""
    from cuda.bindings import nvrtc

    text = (HERE / source).read_bytes()
    headers = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.cuh")))
    version = ".".join(str(part) for part in _ok(nvrtc.nvrtcVersion()))
    key = hashlib.sha256(b"\0".join((text, headers, version.encode(), *(o.encode() for o in options)))).hexdigest()[:32]
    folder = own_folder("cuda")
    if folder is None:
        return _compile(text, source, options)
    kept = folder / f"{Path(source).stem}-{key}.cubin"
    if not kept.exists():
        image = _compile(text, source, options)
        beside = kept.with_suffix(f".{os.getpid()}.part")
        beside.write_bytes(image)
        beside.replace(kept)
    return kept.read_bytes()


def _compile(text: bytes, source: str, options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc

    options = [*options, *(f"-I{folder}" for folder in _include_folders())]
    program = _ok(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    size = _ok(nvrtc.nvrtcGetProgramLogSize(program))
    log = bytearray(size)
    _ok(nvrtc.nvrtcGetProgramLog(program, log))
    if int(status) != 0:
        raise MachineError(f"{source} does not compile here: {log.decode(errors='replace').strip(chr(0))}")
    image = bytearray(_ok(nvrtc.nvrtcGetCUBINSize(program)))
    _ok(nvrtc.nvrtcGetCUBIN(program, image))
    return bytes(image)


def _include_folders() -> list[Path]:
    """Where CUDA's headers lie in the packages that torch brings, and in a toolkit; and this folder."""
    packages = Path(torch.__file__).parents[1] / "nvidia"
    found = [*packages.glob("*/include"), Path("/usr/local/cuda/include")]
    return [HERE, *(folder for folder in found if (folder / "cuda_bf16.h").exists())]


def _packed(arguments: Sequence[Any]) -> tuple[list[Any], Any]:
    """(ctypes values, an array of their addresses). Both must live until the launch has returned."""
    values: list[Any] = []
    for one in arguments:
        if isinstance(one, Tensor):
            values.append(ctypes.c_void_p(one.data_ptr()))
        elif one is None:
            values.append(ctypes.c_void_p(0))
        elif isinstance(one, bool | int):
            values.append(ctypes.c_int32(one))
        elif isinstance(one, float):
            values.append(ctypes.c_float(one))
        else:
            values.append(one)
    return values, (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))


def _ok(result: Any) -> Any:
    """What a call of the bindings gave, without its status; MachineError when that is no success."""
    status, *values = result
    if int(status) != 0:
        raise MachineError(f"CUDA answered {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
