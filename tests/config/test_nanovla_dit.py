"""The DiT stage of nanoVLA-RL's configurations, trained on latents of the VAE stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli
from PIL import Image

from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load, load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.config.validate import validate_config
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.image_io import read_image
from tastemaker.data.images import ImageCollection
from tastemaker.data.latents import LatentFolder
from tastemaker.models.latent_dit.model import LatentDitSpec
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving

OLD = """
dataset_params: {im_path: images, im_size : 32, im_channels : 3}
diffusion_params: {num_timesteps : 1000, beta_start : 0.0002, beta_end : 0.03}
dit_params: {patch_size : 2, num_layers : 2, hidden_size : 32, ff_hidden_dim : 48, num_heads : 3, head_dim : 8,
  timestep_emb_dim : 16}
autoencoder_params: {z_channels: 4, codebook_size : 8192, down_channels : [32, 32], mid_channels : [32],
  down_sample : [True], attn_down : [False], norm_channels: 32, num_heads: 4, num_down_layers : 1, num_mid_layers : 1,
  num_up_layers : 1}
train_params: {seed : 5, task_name: tasks/faces, autoencoder_batch_size: 4, autoencoder_epochs: 3,
  dit_batch_size: 2, dit_epochs: 3, dit_lr: 0.00003, dit_acc_steps: 2, vae_latent_dir_name: latents,
  dit_ckpt_name: dit_ckpt.pth, vae_autoencoder_ckpt_name: vae_autoencoder_ckpt.pth}
"""
NEW = """
dataset: faces
model: {name: dit, params: {hidden_size: 32, num_heads: 2, head_dim: 16, num_layers: 1}, weights: null}
autoencoder: {z_channels: 8, down_sample: [true, true], weights: vae_autoencoder.pth}
train: {epochs: 4, batch_size: 2, lr: 0.0003, save_every: 7, output_dir: outputs/faces_dit}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "datasets.yaml").write_text("faces: {type: image_folder, path: images, im_size: 64}")
    (tmp_path / "both.yaml").write_text(OLD)
    (tmp_path / "dit.yaml").write_text(NEW)
    (tmp_path / "images").mkdir()
    for number in range(5):
        Image.new("RGB", (40, 40), (40 * number, 90, 10)).save(tmp_path / "images" / f"{number}.png")
    return tmp_path


def test_stage_override_selects_the_dit() -> None:
    config = load("both.yaml", ["stage=dit"])
    assert config.model == LatentDitSpec(
        variant="B", conditioning="nothing", image_size=32, patch_size=2, autoencoder="tasks/faces", latent_channels=4,
        downsample_factor=2, width=32, depth=2, heads=3,
        head_dim=8, intermediate_size=48, timestep_embed_dim=16, convention="explainingai",
    )  # fmt: skip
    assert isinstance(config.process, GaussianProcess) and isinstance(config.process.path, VariancePreserving)
    path = config.process.path
    assert (path.beta_schedule, path.beta_start, path.beta_end, path.prediction_type) == (
        "linear",
        0.0002,
        0.03,
        "epsilon",
    )
    assert config.data == ImageCollection(Path("images"), 32)
    assert (config.batch.prompts, config.batch.micro_batch_size, config.steps) == (
        4,
        2,
        6,
    )  # five images in batches of four
    assert (config.optim.lr, config.optim.weight_decay, config.seed) == (3e-5, 0, 5)
    assert (config.output_dir, config.name, config.checkpoint.every) == (Path("tasks"), "faces-dit", 2)
    assert validate_config(config_to_dict(config)) == config
    assert isinstance(load_any_config("both.yaml", ["stage=vae"]), AutoencoderRunConfig)
    assert load("both.yaml", ["optim.lr=1e-4", "stage=dit"]).optim.lr == 1e-4


def test_stage_can_be_set_in_the_file(here: Path) -> None:
    (here / "second.yaml").write_text("extends: both.yaml\nstage: dit\ndit_params: {num_layers: 1}")
    model = load("second.yaml").model
    assert isinstance(model, LatentDitSpec) and (model.depth, model.width) == (1, 32)


def test_new_nanovla_dit_config_is_converted(here: Path) -> None:
    config = load("dit.yaml")
    assert isinstance(config.model, LatentDitSpec)
    assert (config.model.image_size, config.model.latent_channels, config.model.downsample_factor) == (64, 8, 4)
    assert (config.model.autoencoder, config.model.width, config.model.head_dim) == ("vae_autoencoder.pth", 32, 16)
    assert (config.optim.lr, config.optim.weight_decay, config.steps) == (3e-4, 0.01, 12)
    assert (config.output_dir, config.name, config.checkpoint.every) == (Path("outputs"), "faces_dit", 7)
    (here / "short.yaml").write_text(re.sub(r"(?m)^train:.*\n", "", NEW))
    assert load("short.yaml").batch.prompts == 8


def test_other_number_of_timesteps_reaches_path_and_network(here: Path) -> None:
    """The path has that many timesteps, no sampler visits more, and the network gets the index of a timestep."""
    (here / "short.yaml").write_text(OLD.replace("num_timesteps : 1000", "num_timesteps : 40"))
    config = load("short.yaml", ["stage=dit", "model.autoencoder=null", "model.latent_channels=12"])
    assert isinstance(config.process, GaussianProcess) and isinstance(config.process.path, VariancePreserving)
    path = config.process.path
    assert (path.num_train_timesteps, path.beta_start, path.beta_end) == (40, 0.0002, 0.03)
    assert (config.process.num_steps, config.sample.num_steps) == (40, 40)
    model, indices = config.model.load(Placement()), []
    model.net.register_forward_pre_hook(lambda net, inputs: indices.append(inputs[1].tolist()))
    with torch.no_grad():
        model.predict(torch.zeros(3, *model.shape), torch.tensor([0, 20, 39]).add(1) / 40, model.embed(("",) * 3))
    assert indices == [[0, 20, 39]] and path.timesteps(40)[:-1].mul(40).round().sub(1).tolist() == [*range(39, -1, -1)]


def test_existing_latents_and_checkpoints_are_used(here: Path) -> None:
    task = here / "tasks" / "faces"
    (task / "latents").mkdir(parents=True)
    for name in ("vae_autoencoder_ckpt.pth", "dit_ckpt.pth", "latents/latents.json"):
        (task / name).write_bytes(b"")
    config = load("both.yaml", ["stage=dit"])
    assert isinstance(config.model, LatentDitSpec) and config.model.weights == "tasks/faces/dit_ckpt.pth"
    assert config.model.autoencoder == "tasks/faces/vae_autoencoder_ckpt.pth"
    assert isinstance(config.data, LatentFolder) and config.data.path == Path("tasks/faces/latents")
    (here / "other.yaml").write_text(OLD.replace("num_heads: 4", "num_heads: 2"))
    model = load("other.yaml", ["stage=dit"]).model  # the number of heads is not in the checkpoint's tensors
    assert isinstance(model, LatentDitSpec) and model.autoencoder == "tasks/faces"
    (task / "checkpoints").mkdir()  # a run of this package, initialized from that file
    model = load("both.yaml", ["stage=dit"]).model
    assert isinstance(model, LatentDitSpec) and model.autoencoder == "tasks/faces"


def test_both_stages_train_in_sequence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "steps=1", "sample.every=0", "engine.precision=fp32"]
    assert run_cli("train", "both.yaml", "stage=dit", *options) == 2
    assert "model.autoencoder: " in capsys.readouterr().err
    assert run_cli("train", "both.yaml", *options, "loss.lpips=0", "discriminator=null") == 0
    assert run_cli("train", "both.yaml", "stage=dit", *options) == 0
    assert run_cli("generate", "tasks/faces-dit", "process.num_steps=2", "--count", "2", "--out", "made") == 0
    assert read_image(here / "made" / "sheet.png").shape[-1] >= 64


def test_configuration_stands_for_its_run(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`reconstruct`, `encode` and `generate` on a file use the run it led to, name its step, and are never random."""
    options = ["--device", "cpu", "steps=1", "sample.every=0", "engine.precision=fp32"]
    for command in (["reconstruct", "images", "--model"], ["encode", "images", "--size", "32", "--vae"]):
        assert run_cli(*command, "both.yaml") == 2
    assert capfd.readouterr().err.count("TM842") == 2
    assert run_cli("train", "both.yaml", *options, "loss.lpips=0", "discriminator=null") == 0
    assert (
        run_cli("reconstruct", "images", "--model", "both.yaml", "--size", "32", "--out", "a", "--device", "cpu") == 0
    )
    assert run_cli("encode", "images", "--vae", "both.yaml", "--size", "32", "--out", "b", "--device", "cpu") == 0
    assert capfd.readouterr().err.replace("\n", "").count("weights of tasks/faces/checkpoints/step-000001") == 2
    arguments = ["stage=dit", "process.num_steps=2", "--device", "cpu", "--seed", "3"]
    with pytest.warns(UserWarning, match="random weights"):
        assert run_cli("generate", "both.yaml", *arguments, "--out", "random") == 0
    assert run_cli("train", "both.yaml", "stage=dit", *options, "optim.lr=1") == 0
    assert run_cli("generate", "both.yaml", *arguments, "--out", "file") == 0
    assert "weights of tasks/faces-dit/checkpoints/step-000001" in capfd.readouterr().err
    assert run_cli("generate", "tasks/faces-dit", *arguments[1:], "--out", "run") == 0
    random, file, run = (read_image(here / name / "sheet.png") for name in ("random", "file", "run"))
    assert torch.equal(file, run) and not torch.equal(file, random)
    (here / "both.yaml").write_text(OLD.replace("hidden_size : 32", "hidden_size : 48"))  # edited since
    assert run_cli("generate", "both.yaml", *arguments, "--out", "other") == 2
    assert "TM859" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OLD.replace("num_timesteps : 1000", "num_timesteps : 1"), "num_timesteps is 1"),
        (OLD.replace("hidden_size", "hiden_size"), "'hiden_size'; did you mean 'hidden_size'"),
        (OLD.replace("z_channels", "z_chanels"), "'z_chanels'; did you mean 'z_channels'"),
        (OLD.replace("[True]", "2"), "down_sample: expected a list of true and false, one per block, got 2"),
        (OLD.replace("dit_epochs: 3", "dit_epochs: none"), "epochs is 'none'"),
        (NEW.replace("weights: vae_autoencoder.pth", "weights: null"), "autoencoder.weights is None"),
    ],
)
def test_invalid_dit_configs_are_reported(here: Path, text: str, message: str) -> None:
    (here / "wrong.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load("wrong.yaml", ["stage=dit"] if "train_params" in text else [])
    with pytest.raises(ConfigError, match=r"'third'.*TM762"):
        load("both.yaml", ["stage=third"])
