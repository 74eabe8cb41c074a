"""The benchmark's rows tell where they really come from."""

import argparse
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import REPOSITORY

from trainkit import staging


def test_a_part_that_runs_on_the_cpu_does_not_name_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what runs on the GPU, which is pretended here."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools" / "bench")
    import bench

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def part(args: argparse.Namespace) -> bench.Rows:
        small = ("--epochs=1", "--train-size=128", "--test-size=100", "--precision=fp32", "--no-cuda")
        yield from bench._stage(args, "ddp", 0, "ddp", *small, threads=1)
        yield {"case": "ladder"}

    path = tmp_path / "part.csv"
    bench._measure(part, argparse.Namespace(data_dir=staging.DEFAULT_DIR), path)
    on_cpu, on_gpu = pd.read_csv(path).device_name
    assert on_cpu.startswith("CPU: ") and on_gpu == "a GPU"


def test_its_speed_has_tf32_where_the_classic_script_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "tools" / "bench")
    import bench

    monkeypatch.setattr(bench, "_classic", lambda *_: iter(()))
    monkeypatch.setattr(bench, "_stage", lambda args, case, *_: [case])
    for capability, cases in (((7, 5), ["fp32", "bf16"]), ((8, 0), ["fp32", "tf32", "bf16"])):
        monkeypatch.setattr(bench, "has_tf32", lambda device, capability=capability: capability >= (8, 0))
        assert list(bench.speed(argparse.Namespace(repeats=1))) == [f"ours, {case}" for case in cases]
