"""Named datasets of `datasets.yaml`, and configurations of nanoVLA-RL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tastemaker.compat.nanovla import OLD_SECTIONS, OLD_TRAIN_KEYS, OTHER_TRAIN_KEYS, TRAIN_KEYS
from tastemaker.config.dump import config_to_dict
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.config.validate import build_component, validate_config
from tastemaker.core.registry import ConfigError
from tastemaker.data.dataset import DataSpec
from tastemaker.data.images import ImageCollection
from tastemaker.data.toy import ToyImages
from tastemaker.models.block_vae import BlockVaeSpec
from tastemaker.models.vae import CustomAutoencoderSpec

DATASETS = """
faces: {type: image_collection, path: images, image_size: 64, max_skipped: 3}
celebhq: {path: images, im_size: 128, im_channels: 1, type: image_folder}
toys: {type: toy_images, num_samples: 16}
"""
BASE = """
train: {seed: 1111, batch_size: 4, lr: 0.00001, weight_decay: 0.01, epochs: 100, save_every: 100, output_dir: outputs}
"""
NEW = """
extends: base
dataset: celebhq
model:
  name: vae
  params: {z_channels: 4, down_channels: [32, 64], mid_channels: [64], down_sample: [true], attn_down: [false],
           norm_channels: 32, num_heads: 4, num_down_layers: 2, num_mid_layers: 2, num_up_layers: 2}
  weights: null
train: {epochs: 3, batch_size: 2, disc_start: 7, disc_weight: 0.5, perceptual_weight: 1.0, kl_weight: 0.000005,
        output_dir: outputs/celebhq_vae, autoencoder_acc_steps: 2, autoencoder_img_save_steps: 64,
        vae_autoencoder_ckpt_name: vae_autoencoder.pth}
"""
OLD = """
dataset_params: {im_path: images, im_size : 128, im_channels : 3}
diffusion_params: {num_timesteps : 1000, beta_start : 0.0001, beta_end : 0.02}
dit_params: {patch_size : 2}
autoencoder_params: {z_channels: 4, codebook_size : 8192, down_channels : [32, 64], mid_channels : [64],
  down_sample : [True], attn_down : [False], norm_channels: 32, num_heads: 4, num_down_layers : 2, num_mid_layers : 2,
  num_up_layers : 2}
train_params: {seed : 5, task_name: celebhq, autoencoder_batch_size: 4, autoencoder_epochs: 3, autoencoder_lr: 0.00002,
  autoencoder_acc_steps: 1, disc_start: 7500, disc_weight: 0.5, codebook_weight: 1, commitment_beta: 0.2,
  perceptual_weight: 1, kl_weight: 0.000005, autoencoder_img_save_steps: 64, save_latents: False, dit_batch_size: 32,
  dit_epochs: 500, num_samples: 1, num_grid_rows: 2, dit_lr: 0.00001, dit_acc_steps: 1, vae_latent_dir_name: latents,
  dit_ckpt_name: dit_ckpt.pth, vae_autoencoder_ckpt_name: vae_autoencoder_ckpt.pth,
  vae_discriminator_ckpt_name: vae_discriminator_ckpt.pth}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in nanoVLA-RL's layout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    for name, text in (("datasets", DATASETS), ("base", BASE), ("vae", NEW), ("celebhq", OLD)):
        (tmp_path / "configs" / f"{name}.yaml").write_text(text)
    (tmp_path / "images").mkdir()
    for number in range(5):
        Image.new("RGB", (9, 9)).save(tmp_path / "images" / f"{number}.png")
    return tmp_path


def read_dataset(**settings: Any) -> Any:
    return build_component(DataSpec, {"type": "named", **settings}, "data")


def test_named_dataset_with_overrides() -> None:
    assert read_dataset(name="faces") == ImageCollection(Path("images"), 64, max_skipped=3)
    assert read_dataset(name="faces", image_size=32, random_flip=True) == ImageCollection(
        Path("images"), 32, max_skipped=3, random_flip=True
    )
    assert read_dataset(name="toys", file="configs/datasets.yaml") == ToyImages(num_samples=16)


def test_nanovla_dataset_entries_are_converted() -> None:
    assert read_dataset(name="celebhq") == ImageCollection(Path("images"), 128, grayscale=True)


def test_datasets_file_in_the_current_directory_has_precedence(here: Path) -> None:
    (here / "datasets.yaml").write_text("faces: {type: toy_images}")
    assert read_dataset(name="faces") == ToyImages()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fases: {type: image_collection, path: x}", "'fases'"),
        ("faces: images", "'faces' is 'images'"),
        ("faces: {path: x}", "'faces' has the type None"),
        ("faces: {type: named, name: faces}", "'faces' has the type 'named'"),
        (
            "faces: {type: image_colection, path: x}",
            "'image_colection'; did you mean 'image_collection'",
        ),
        ("faces: {type: image_folder, path: x, im_channels: 4}", "im_channels 1 or 3, got 4"),
        ("[]", "TM037"),
    ],
)
def test_invalid_dataset_files_are_reported(here: Path, text: str, message: str) -> None:
    (here / "datasets.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_dataset(name="faces")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*TM035"):
        read_dataset(name="faces", file="nowhere.yaml")


def test_named_dataset_is_resolved_in_the_dump() -> None:
    config = validate_config({"autoencoder": {"type": "vae"}, "data": {"type": "named", "name": "toys"}})
    dumped = config_to_dict(config)
    assert dumped["data"]["type"] == "toy_images" and validate_config(dumped) == config


def test_new_nanovla_vae_config_is_converted(here: Path) -> None:
    config = load_any_config("configs/vae.yaml")
    assert isinstance(config, AutoencoderRunConfig)
    assert config.autoencoder == BlockVaeSpec(
        1, 4, (32, 64), (64,), (True,), (False,), 32, 4, 2, 2, 2, kl_weight=5e-6
    ) and config.data == ImageCollection(Path("images"), 128, grayscale=True)
    assert (config.batch_size, config.micro_batch_size, config.steps, config.seed) == (
        4,
        2,
        6,
        1111,
    )  # five images in batches of four
    assert (config.output_dir, config.name) == (Path("outputs"), "celebhq_vae")
    assert (config.optim.lr, config.optim.weight_decay) == (1e-5, 0.01)
    # nanoVLA-RL counts batches, two per update: the discriminator starts after the seventh batch.
    assert (config.sample.every, config.checkpoint.every, config.discriminator and config.discriminator.start_step) == (
        32,
        50,
        4,
    )
    assert config.discriminator is not None and config.discriminator.optim is not None
    assert (config.discriminator.weight, config.discriminator.loss) == (0.5, "least_squares")
    assert config.discriminator.optim.betas == (0.5, 0.999) and config.loss.lpips == 1 and config.loss.mse == 1
    assert validate_config(config_to_dict(config)) == config
    assert load_any_config("configs/vae.yaml", ["steps=3", "optim.lr=3e-4"]).steps == 3


def test_old_nanovla_config_is_the_vae_stage_by_default() -> None:
    config = load_any_config("configs/celebhq.yaml")
    assert isinstance(config, AutoencoderRunConfig) and isinstance(config.autoencoder, BlockVaeSpec)
    assert (config.batch_size, config.micro_batch_size, config.steps, config.seed) == (4, None, 6, 5)
    assert (config.optim.lr, config.optim.betas, config.optim.weight_decay) == (2e-5, (0.5, 0.999), 0)
    assert (config.output_dir, config.name) == (Path(), "celebhq") and config.autoencoder.im_channels == 3


def test_batch_counts_are_converted_to_updates(here: Path) -> None:
    text = OLD.replace("autoencoder_acc_steps: 1", "autoencoder_acc_steps: 4").replace("steps: 64", "steps: 66")
    (here / "configs" / "celebhq.yaml").write_text(text)
    config = load_any_config("configs/celebhq.yaml")
    assert isinstance(config, AutoencoderRunConfig) and config.discriminator is not None
    assert (config.batch_size, config.micro_batch_size, config.discriminator.start_step, config.sample.every) == (
        16,
        4,
        1875,
        17,
    )
    for wrong in ("0", "four", "2.5", "true"):
        (here / "configs" / "celebhq.yaml").write_text(text.replace("acc_steps: 4", f"acc_steps: {wrong}"))
        with pytest.raises(ConfigError, match=r"autoencoder_acc_steps is .*an integer.*TM768"):
            load_any_config("configs/celebhq.yaml")


def test_existing_checkpoints_initialize_the_run(here: Path) -> None:
    (here / "celebhq").mkdir()
    (here / "celebhq" / "vae_autoencoder_ckpt.pth").write_bytes(b"")
    config = load_any_config("configs/celebhq.yaml")
    assert isinstance(config, AutoencoderRunConfig) and isinstance(config.autoencoder, BlockVaeSpec)
    assert (
        config.autoencoder.weights == "celebhq/vae_autoencoder_ckpt.pth"
        and config.discriminator
        and not config.discriminator.weights
    )


def test_custom_network_and_invalid_nanovla_configs(here: Path) -> None:
    (here / "configs" / "own.yaml").write_text("extends: vae\nmodel: {name: 'my_package:Net', params: {width: 3}}")
    (here / "configs" / "bad.yaml").write_text("extends: vae\ntrain: {bach_size: 3}")
    with pytest.raises(ConfigError, match=r"'bach_size'.*'batch_size'.*TM770"):
        load_any_config("configs/bad.yaml")
    (here / "configs" / "dit.yaml").write_text("extends: base\ndataset: celebhq\nmodel: {name: dit}")
    with pytest.raises(ConfigError, match=r"autoencoder\.weights is None.*TM764"):
        load_any_config("configs/dit.yaml")
    config = load_any_config("configs/own.yaml")
    assert isinstance(config, AutoencoderRunConfig) and isinstance(config.autoencoder, CustomAutoencoderSpec)
    assert config.autoencoder.class_path == "my_package:Net" and config.autoencoder.params["width"] == 3


def test_migration_page_names_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrate-nanovla.md").read_text(encoding="utf-8")
    documented = {*re.findall(r"`([\w.]+)`", page)}
    params = {*re.findall(r"(\w+) ?:", NEW[NEW.index("params") :].split("}")[0])} - {"params"}
    expected = {
        *OLD_SECTIONS,
        *OLD_TRAIN_KEYS,
        *TRAIN_KEYS,
        *OTHER_TRAIN_KEYS,
        *params,
        "dataset",
        "im_path",
        "im_size",
        "im_channels",
        "weights",
    }
    expected |= {
        "patch_size",
        "num_layers",
        "hidden_size",
        "ff_hidden_dim",
        "head_dim",
        "timestep_emb_dim",
        "codebook_size",
    }
    expected |= {"num_timesteps", "beta_start", "beta_end"}
    assert not expected - documented


def test_sibling_file_has_precedence_over_the_package(here: Path) -> None:
    (here / "grpo-toy-flow.yaml").write_text("extends: grpo-toy-flow\nsteps: 3")
    assert load_any_config("grpo-toy-flow.yaml").steps == 3
    (here / "mine.yaml").write_text("extends: grpo-toy-flow")
    assert load_any_config("mine.yaml").steps == 3
