"""A disturbed run has the loss curve and the weights of the undisturbed run, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from soak import FAULTS, RewardServer, SoakedRun, read_curve, read_final_files, schedule_faults

SETTINGS = ("batch.prompts=2", "objective.group_size=2", "process.num_steps=2", "sample.every=0", "guard.every=0")


def compare_disturbed_with_undisturbed(
    folder: Path, steps: int, faults: int, every: int, slow_disk: float, *more: str, long_stop: float = 0.0
) -> str:
    """Train once in peace, with the reward in the ranks, and once with faults and a server; return what it took."""
    settings = (*SETTINGS, f"steps={steps}", f"checkpoint.every={every}", *more)
    server = RewardServer(folder)
    undisturbed = SoakedRun(folder / "undisturbed", None, settings)
    disturbed = SoakedRun(folder / "disturbed", server, settings, slow_disk, long_stop)
    begin = time.monotonic()
    try:
        undisturbed.start()
        undisturbed.finish()
        started = time.monotonic()
        server.start()
        disturbed.start()
        for step, fault in schedule_faults(faults, steps, seed=23):
            disturbed.wait_for_step(step)
            disturbed.inject(fault)
        disturbed.finish()
    finally:
        undisturbed.kill()
        disturbed.kill()
        server.kill()
    expected, curve = read_curve(undisturbed.directory), read_curve(disturbed.directory)
    assert [row["step"] for row in curve] == list(range(1, steps + 1))
    assert {"loss/policy", "grad_norm", "reward/mean"} <= curve[0].keys()
    different = [row["step"] for row, other in zip(curve, expected, strict=True) if row != other]
    assert not different, f"the metrics differ from step {different[0]} on"
    weights = read_final_files(disturbed.directory, steps)
    assert weights and weights == read_final_files(undisturbed.directory, steps)
    assert set(disturbed.counts) == set(FAULTS)
    total, in_faults = time.monotonic() - started, sum(disturbed.seconds.values())
    parts = ", ".join(f"{fault} {seconds:.0f} s" for fault, seconds in sorted(disturbed.seconds.items()))
    return (
        f"{steps} steps, {disturbed.counts}: undisturbed {started - begin:.0f} s, disturbed {total:.0f} s, of which "
        f"{in_faults:.0f} s in faults ({parts}) and {total - in_faults:.0f} s between them"
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_disturbed_run_equals_the_undisturbed_one(tmp_path):
    print(compare_disturbed_with_undisturbed(tmp_path, 40, len(FAULTS), 5, 0.01, "engine.strategy=fsdp"))


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.ranks
def test_six_hours_of_steps_with_faults_equal_the_undisturbed_run(tmp_path):
    """4,320 steps, as many as 6 hours have at 5 seconds each."""
    print(compare_disturbed_with_undisturbed(tmp_path, 4320, 120, 20, 0.005, long_stop=15.0))
