"""Train an autoencoder and a generator from a folder of images with commands; on two ranks, and after a kill."""

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
from test_interruption import equal, final, kill_after

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
FEW = ("sample.every=0", "guard.every=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve playground images with captions."""
    folder = tmp_path_factory.mktemp("walk")
    scenes = PlaygroundScenes(device="cpu").load(0).batch(0, 12, 0, 1)
    (folder / "pictures").mkdir()
    for i, (prompt, picture) in enumerate(zip(scenes.prompts, scenes.pixels, strict=True)):
        save_image(picture, folder / "pictures" / f"{i}.png")
        (folder / "pictures" / f"{i}.txt").write_text(prompt)
    return folder


def tell(place: Path, *arguments: str) -> str:
    """Run a tastemaker command in a folder; return what it prints to stderr."""
    settings = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tastemaker", *arguments]
    process = ForkedProcess(command, env=settings, cwd=place)
    reported = process.communicate(timeout=240)[1]
    assert process.returncode == 0, reported
    return reported


def trained_vae(place: Path, *more: str) -> None:
    gallery = "data={type: image_collection, path: pictures, image_size: 64}"
    tell(place, "train", "vae-playground", gallery, *VAE, "batch_size=4", "steps=3", "sample.every=0", *more)


def codec(place: Path) -> Path:
    """Return the autoencoder of the first stage, trained once with its latents."""
    if not (place / "latents/latents.json").is_file():
        trained_vae(place)
        reported = tell(place, "encode", "pictures", "--vae", "runs/vae-playground", "--size", "64", "--device", "cpu")
        assert "latents of 12 images" in reported
    return place / "runs/vae-playground"


def test_two_stage_script_names_existing_recipes() -> None:
    script = HERE.parent.parent / "tools/folder-walk.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert set(re.findall(r"[\w-]*dit-folder[\w-]*", script.read_text())) <= set(list_generator_recipes())


@pytest.mark.slow
def test_two_stages_from_a_folder_of_images(place: Path) -> None:
    codec(place)
    own = ("model.autoencoder=runs/vae-playground", *SMALL, *FEW)
    latents = "data={type: latent_folder, path: latents}"
    tell(place, "train", "dit-folder-text", *own, latents, "batch.prompts=4", "steps=3")
    assert checkpoint.latest_checkpoint(place / "runs/dit-folder-text") is not None
    for recipe in ("reward-gradient-dit-folder", "grpo-dit-folder"):
        tell(place, "train", recipe, *own, "batch.prompts=2", "steps=2", "process.num_steps=5")
        assert checkpoint.latest_checkpoint(place / "runs" / recipe) is not None
    page = (HERE.parent.parent / "docs/from-folder-to-aligned.md").read_text(encoding="utf-8")
    (place / "aligned.yaml").write_text(page.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    tell(place, "train", "aligned.yaml", "batch.prompts=2", "steps=2", "engine.precision=fp32", "guard.every=0")
    assert checkpoint.latest_checkpoint(place / "runs/aligned") is not None
    aligned = ("generate", "runs/reward-gradient-dit-folder", "-p", "a photo of a dog", "-p", "a photo of two cats")
    tell(place, *aligned, "--device", "cpu", "--out", "ours")
    solver = ("--scheduler", "DPMSolverMultistepScheduler", "--num-inference-steps", "4")
    reported = tell(place, *aligned, "--device", "cpu", "--out", "theirs", *solver)
    assert "8 network calls" in reported
    assert len(list((place / "theirs").glob("0*.png"))) == len(list((place / "ours").glob("0*.png"))) == 2
    exam = ("evaluate", "playeval", "--model", "runs/grpo-dit-folder", "--num-prompts", "6", "--count", "1")
    tell(place, *exam, "--device", "cpu", "--out", "exam")
    assert (place / "exam/report.json").is_file()


@pytest.mark.slow
@pytest.mark.ranks
def test_two_stages_on_two_ranks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    codec(place)
    gallery = "data={type: image_collection, path: pictures, image_size: 64}"
    on_ranks(2, "train", "vae-playground", gallery, *VAE, "batch_size=4", "steps=2", "sample.every=0", "name=vae-two")
    on_ranks(2, "encode", "pictures", "--vae", "runs/vae-two", "--size", "64", "--shard-size", "5", "--out", "two")
    data = f"data={{type: latent_folder, path: {place / 'two'}}}"
    own = (
        f"model.autoencoder={place / 'runs/vae-two'}",
        *SMALL,
        *FEW,
        data,
        "batch.prompts=4",
        "steps=2",
        "optim.lr=1e-3",
    )
    tell(place, "train", "dit-folder-text", *own, "name=dit-one")
    on_ranks(2, "train", "dit-folder-text", *own, "name=dit-two")
    one, two = (final(place / "runs" / name, 2) for name in ("dit-one", "dit-two"))
    for key in (key for key in one if key.startswith("weights")):
        torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_killed_second_stage_resumes_exactly(place: Path, tmp_path: Path) -> None:
    data = f"data={{type: latent_folder, path: {codec(place).parent.parent / 'latents'}}}"
    settings = (f"model.autoencoder={codec(place)}", *SMALL, data, "guard.every=0", "steps=6", "ema_decay=0.9")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    straight = launch("dit-folder-text", whole, *settings)
    kill_after(launch("dit-folder-text", broken, *settings, "checkpoint.every=3"), saved=1, delay=0.0)
    finish(straight)
    assert checkpoint.latest_checkpoint(broken) is not None
    finish(launch("dit-folder-text", broken, *settings, "checkpoint.every=3"))
    assert equal(final(whole, 6), final(broken, 6))
