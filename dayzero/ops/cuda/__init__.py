"""Variants written in CUDA C++, compiled by NVRTC when they are first bound. A wrapper, and beside it its ``.cu``."""
