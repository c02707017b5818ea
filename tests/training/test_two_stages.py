"""Commands that train an autoencoder and a generator on a folder of images, also on two ranks and after a kill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fork_server import ForkedProcess
from launch_ranks import HERE, finish, launch, on_ranks
from test_interruption import all_equal, final_tensors, kill_after

from tastemaker.config.load import list_generator_recipes
from tastemaker.data.image_io import save_image
from tastemaker.data.playground import PlaygroundScenes
from tastemaker.training import checkpoint

ENGINE = "engine={device: cpu, precision: fp32, compile: false, strategy: replicated}"
VAE = (
    "autoencoder={type: vae, latent_channels: 4, width: 8, downsample_factor: 8, latent_noise: 0.05}",
    "discriminator=null",
    "validation=null",
    ENGINE,
)
SMALL = (
    "model.latent_channels=4",
    "model.downsample_factor=8",
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "model.patch_size=4",
    ENGINE,
)
NO_SAMPLES = ("sample.every=0", "guard.every=0")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve playground images with captions."""
    images_root = tmp_path_factory.mktemp("two_stages")
    scenes = PlaygroundScenes(device="cpu").load(0).batch(0, 12, 0, 1)
    (images_root / "images").mkdir()
    for i, (prompt, image) in enumerate(zip(scenes.prompts, scenes.pixels, strict=True)):
        save_image(image, images_root / "images" / f"{i}.png")
        (images_root / "images" / f"{i}.txt").write_text(prompt)
    return images_root


def run_command(directory: Path, *arguments: str) -> str:
    """Run a tastemaker command in a folder; return what it prints to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tastemaker", *arguments]
    process = ForkedProcess(command, env=environment, cwd=directory)
    output = process.communicate(timeout=600)[1]
    assert process.returncode == 0, output
    return output


def train_vae(directory: Path, *overrides: str) -> None:
    data = "data={type: image_collection, path: images, image_size: 64}"
    run_command(
        directory, "train", "vae-playground", data, *VAE, "batch_size=4", "steps=3", "sample.every=0", *overrides
    )


def first_stage(directory: Path) -> Path:
    """Return the autoencoder of the first stage, trained once with its latents."""
    if not (directory / "latents/latents.json").is_file():
        train_vae(directory)
        output = run_command(
            directory, "encode", "images", "--vae", "runs/vae-playground", "--size", "64", "--device", "cpu"
        )
        assert "latents of 12 images" in output
    return directory / "runs/vae-playground"


def test_two_stage_script_names_existing_recipes() -> None:
    script = HERE.parent.parent / "tools/folder-walk.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert set(re.findall(r"[\w-]*dit-folder[\w-]*", script.read_text())) <= set(list_generator_recipes())


@pytest.mark.slow
def test_two_stages_from_a_folder_of_images(directory: Path) -> None:
    first_stage(directory)
    model = ("model.autoencoder=runs/vae-playground", *SMALL, *NO_SAMPLES)
    latents = "data={type: latent_folder, path: latents}"
    run_command(directory, "train", "dit-folder-text", *model, latents, "batch.prompts=4", "steps=3")
    assert checkpoint.latest_checkpoint(directory / "runs/dit-folder-text") is not None
    for recipe in ("reward-gradient-dit-folder", "grpo-dit-folder"):
        run_command(directory, "train", recipe, *model, "batch.prompts=2", "steps=2", "process.num_steps=5")
        assert checkpoint.latest_checkpoint(directory / "runs" / recipe) is not None
    page = (HERE.parent.parent / "docs/from-folder-to-aligned.md").read_text(encoding="utf-8")
    (directory / "aligned.yaml").write_text(page.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    run_command(
        directory, "train", "aligned.yaml", "batch.prompts=2", "steps=2", "engine.precision=fp32", "guard.every=0"
    )
    assert checkpoint.latest_checkpoint(directory / "runs/aligned") is not None
    generate = ("generate", "runs/reward-gradient-dit-folder", "-p", "a photo of a dog", "-p", "a photo of two cats")
    run_command(directory, *generate, "--device", "cpu", "--out", "ours")
    solver = ("--scheduler", "DPMSolverMultistepScheduler", "--num-inference-steps", "4")
    output = run_command(directory, *generate, "--device", "cpu", "--out", "theirs", *solver)
    assert "16 network calls" in output  # with the guidance of `sample`
    assert len(list((directory / "theirs").glob("0*.png"))) == len(list((directory / "ours").glob("0*.png"))) == 2
    evaluate = ("evaluate", "playeval", "--model", "runs/grpo-dit-folder", "--num-prompts", "6", "--count", "1")
    run_command(directory, *evaluate, "--device", "cpu", "--out", "evaluation")
    assert (directory / "evaluation/report.json").is_file()


@pytest.mark.slow
@pytest.mark.ranks
def test_two_stages_on_two_ranks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    first_stage(directory)
    images = "data={type: image_collection, path: images, image_size: 64}"
    on_ranks(2, "train", "vae-playground", images, *VAE, "batch_size=4", "steps=2", "sample.every=0", "name=vae-two")
    on_ranks(2, "encode", "images", "--vae", "runs/vae-two", "--size", "64", "--shard-size", "5", "--out", "two")
    data = f"data={{type: latent_folder, path: {directory / 'two'}}}"
    model = (
        f"model.autoencoder={directory / 'runs/vae-two'}",
        *SMALL,
        *NO_SAMPLES,
        data,
        "batch.prompts=4",
        "steps=2",
        "optim.lr=1e-3",
    )
    run_command(directory, "train", "dit-folder-text", *model, "name=dit-one")
    on_ranks(2, "train", "dit-folder-text", *model, "name=dit-two")
    one, two = (final_tensors(directory / "runs" / name, 2) for name in ("dit-one", "dit-two"))
    for key in (key for key in one if key.startswith("weights")):
        torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_killed_second_stage_resumes_exactly(directory: Path, tmp_path: Path) -> None:
    data = f"data={{type: latent_folder, path: {first_stage(directory).parent.parent / 'latents'}}}"
    settings = (
        f"model.autoencoder={first_stage(directory)}",
        *SMALL,
        data,
        "guard.every=0",
        "steps=6",
        "ema_decay=0.9",
    )
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    processes = launch("dit-folder-text", uninterrupted, *settings)
    kill_after(launch("dit-folder-text", killed, *settings, "checkpoint.every=3"), saved=1, delay=0.0)
    finish(processes)
    assert checkpoint.latest_checkpoint(killed) is not None
    finish(launch("dit-folder-text", killed, *settings, "checkpoint.every=3"))
    assert all_equal(final_tensors(uninterrupted, 6), final_tensors(killed, 6))
