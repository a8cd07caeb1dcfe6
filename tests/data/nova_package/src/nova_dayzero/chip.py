"""A device record: what ``--hardware novachip`` means. Its variants run on the CPU."""

from dayzero.hardware import GB, TB, TFLOPS, Hardware

HARDWARE = Hardware(
    "novachip",
    memory_bytes=96 * GB,
    bandwidth=2.5 * TB,
    link=200 * GB,
    flops={"bf16": 400 * TFLOPS, "e4m3": 800 * TFLOPS},
    node=4,
    target="cpu",
    features=frozenset({"fp8"}),
)
