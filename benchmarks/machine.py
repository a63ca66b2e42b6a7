"""Helpers shared by the benchmarks."""

import os
import platform
from pathlib import Path

import torch


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
