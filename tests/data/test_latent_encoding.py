"""Image latents are cached in shards, equal on any number of ranks; stale caches are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from tastemaker.cli import main
from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data import image_encoding
from tastemaker.data.image_encoding import LatentEncodingOptions, encode_latents
from tastemaker.data.image_io import read_image, save_image
from tastemaker.data.image_transforms import center_crop, decode_square
from tastemaker.data.latents import LatentFolder
from tastemaker.models import weight_files
from tastemaker.models.pretrained_autoencoder import load_autoencoder
from tastemaker.models.vae import VaeSpec
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

SILENT_CONSOLE = Console(quiet=True)
SMALL = {"type": "vae", "latent_channels": 4, "width": 8, "downsample_factor": 4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven images in class folders, again with captions, and two autoencoders."""
    folder = tmp_path_factory.mktemp("latents")
    torch.manual_seed(0)
    for i in range(7):
        image = torch.rand(1, 3, 20, 24)
        for path in (folder / "classes" / ("cat", "dog")[i % 2] / f"{i}.png", folder / "captioned" / f"{i}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_image(image, path)
        (folder / "captioned" / f"{i}.txt").write_text(f"picture number {i}\n")
    for name, seed in (("vae", 0), ("other", 1)):
        net = VaeSpec(4, 8, 4, seed=seed).load(Placement())
        net.measure_latents(torch.rand(8, 3, 16, 16))
        weight_files.write_weights(
            folder / f"{name}.safetensors", net.state_dict(), {"autoencoder": SMALL}, torch.float32
        )
    return folder


def encoding_options(
    inputs: Path, out: Path, images: str = "classes", vae: str = "vae", size: int = 16, **options: object
) -> LatentEncodingOptions:
    settings = {"shard_size": 3, **options}
    return LatentEncodingOptions(inputs / images, str(inputs / f"{vae}.safetensors"), out, size, **settings)  # type: ignore[arg-type]


def test_latents_encode_the_center_crop(inputs: Path, tmp_path: Path) -> None:
    encode_latents(encoding_options(inputs, tmp_path, flip=True), Placement(), SILENT_CONSOLE)
    dataset = LatentFolder(tmp_path).load(0)
    assert len(dataset) == 7 and dataset.manifest.shape == (4, 4, 4) and dataset.manifest.views == 2
    assert [len(shard.prompts) for shard in dataset.shards] == [3, 3, 1]
    net = load_autoencoder(str(inputs / "vae.safetensors"), Placement())
    run_overrides = center_crop(read_image(inputs / "classes/cat/0.png")[0], 16)[None]
    with torch.no_grad():
        expected = net.encode(torch.cat([run_overrides, run_overrides.flip(-1)]))  # type: ignore[operator]
    assert (dataset.cache[0].float() - expected).abs().max() < 0.1  # rounding of pixels differs
    assert dataset.prompts == ("0",) * 4 + ("1",) * 3
    assert LatentFolder(tmp_path, caption_source="class_name").load(0).prompts == ("cat",) * 4 + ("dog",) * 3
    assert set(LatentFolder(tmp_path, caption_source="empty").load(0).prompts) == {""}


def test_captions_are_stored(inputs: Path, tmp_path: Path) -> None:
    encode_latents(encoding_options(inputs, tmp_path, "captioned"), Placement(), SILENT_CONSOLE)
    assert LatentFolder(tmp_path).load(0).prompts[:2] == ("picture number 0", "picture number 1")
    with pytest.raises(ConfigError, match=r"has no class_id.*TM202"):
        LatentFolder(tmp_path, caption_source="class_id").load(0)


def test_std_is_measured_over_all_shards(inputs: Path, tmp_path: Path) -> None:
    encode_latents(encoding_options(inputs, tmp_path), Placement(), SILENT_CONSOLE)
    dataset = LatentFolder(tmp_path).load(0)
    all_latents = torch.cat([x.double().flatten() for x in dataset.cache])
    assert dataset.std == pytest.approx(float(all_latents.std(correction=0)), rel=1e-6)


def test_ranks_write_the_same_shards_and_encoding_resumes(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_latents(encoding_options(inputs, tmp_path / "complete"), Placement(), SILENT_CONSOLE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, shard_count in (("1", 1), ("0", 3)):
        monkeypatch.setenv("RANK", rank)
        encode_latents(encoding_options(inputs, tmp_path / "shared"), Placement(), SILENT_CONSOLE)
        assert len(list((tmp_path / "shared").glob("*.safetensors"))) == shard_count
        if rank == "1":
            with pytest.raises(ConfigError, match=r"holds 1 of 3 shards.*TM200"):
                LatentFolder(tmp_path / "shared").load(0)
    names = sorted(file.name for file in (tmp_path / "complete").iterdir())
    assert names[-1] == "latents.json" and len(names) == 4
    for name in names:
        assert (tmp_path / "complete" / name).read_bytes() == (tmp_path / "shared" / name).read_bytes(), name
    mtime = (tmp_path / "complete" / names[0]).stat().st_mtime_ns
    (tmp_path / "complete" / names[1]).unlink()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    encode_latents(encoding_options(inputs, tmp_path / "complete"), Placement(), SILENT_CONSOLE)
    assert (tmp_path / "complete" / names[1]).read_bytes() == (tmp_path / "shared" / names[1]).read_bytes()
    assert (tmp_path / "complete" / names[0]).stat().st_mtime_ns == mtime


@pytest.fixture
def broken_images(inputs: Path, tmp_path: Path) -> Path:
    """The captioned images, two of them unreadable and one without a caption."""
    folder = tmp_path / "broken"
    shutil.copytree(inputs / "captioned", folder)
    for name in ("0", "4"):
        (folder / f"{name}.png").write_bytes(b"none")
    (folder / "5.txt").unlink()
    return folder


def test_broken_images_are_reported_and_skipped(inputs: Path, broken_images: Path, tmp_path: Path) -> None:
    log = StringIO()
    options = replace(encoding_options(inputs, tmp_path / "out"), images=broken_images, caption_source="caption")
    encode_latents(options, Placement(), Console(file=log, width=200))
    output = log.getvalue()
    assert all(f"{name}.png cannot be " in output for name in "045") and output.count("skipped: ") == 3
    assert "latents of 4 images" in output and "3 could not be read" in output
    dataset = LatentFolder(tmp_path / "out").load(0)
    assert [len(shard.class_ids) for shard in dataset.shards] == [2, 1, 1] and len(dataset) == 4
    assert dataset.prompts == tuple(f"picture number {i}" for i in (1, 2, 3, 6))
    complete = tmp_path / "complete"
    encode_latents(replace(options, out=complete, images=inputs / "captioned"), Placement(), SILENT_CONSOLE)
    all_latents = LatentFolder(complete).load(0).cache
    assert all(dataset._read(row, 0).equal(all_latents[i, 0]) for row, i in enumerate((1, 2, 3, 6)))
    assert len(dataset.batch(0, 4, 0, 1).x) == 4


def test_more_broken_images_than_allowed_stop_and_keep_finished_shards(
    inputs: Path, broken_images: Path, tmp_path: Path
) -> None:
    options = replace(
        encoding_options(inputs, tmp_path / "out"), images=broken_images, caption_source="caption", max_skipped=1
    )
    with pytest.raises(ConfigError, match=r"TM172"):
        encode_latents(options, Placement(), SILENT_CONSOLE)
    assert [file.name for file in (tmp_path / "out").glob("latents-*")] == ["latents-00000-of-00003.safetensors"]
    with pytest.raises(ConfigError, match=r"TM176"):  # one was skipped in the first run
        encode_latents(replace(options, max_skipped=2), Placement(), SILENT_CONSOLE)
    encode_latents(replace(options, max_skipped=3), Placement(), SILENT_CONSOLE)
    assert len(LatentFolder(tmp_path / "out").load(0)) == 4


def test_folder_with_only_broken_images_is_refused(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"TM201"):
        encode_latents(
            replace(encoding_options(inputs, tmp_path / "out"), images=tmp_path / "images"), Placement(), SILENT_CONSOLE
        )


def test_interruption_within_a_shard_loses_one_batch(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_encoding, "BATCH_SIZE", 2)
    options, decoded_names = encoding_options(inputs, tmp_path / "interrupted", shard_size=7), []
    encode_latents(replace(options, out=tmp_path / "complete"), Placement(), SILENT_CONSOLE)
    original_decode = decode_square

    def decode_until_interrupted(encoded: object, name: str, size: int) -> torch.Tensor:
        decoded_names.append(name)
        if len(decoded_names) == 6:
            raise KeyboardInterrupt
        return original_decode(encoded, name, size)  # type: ignore[arg-type]

    monkeypatch.setattr(image_encoding, "decode_square", decode_until_interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode_latents(options, Placement(), SILENT_CONSOLE)
    assert len(list((tmp_path / "interrupted").glob(".*.piece"))) == 2
    encode_latents(options, Placement(), SILENT_CONSOLE)
    assert len(decoded_names) == 6 + 3  # four of seven were saved
    names = sorted(file.name for file in (tmp_path / "interrupted").iterdir())
    assert names == ["latents-00000-of-00001.safetensors", "latents.json"]
    assert all(
        (tmp_path / "interrupted" / name).read_bytes() == (tmp_path / "complete" / name).read_bytes() for name in names
    )


def test_batches_depend_on_seed_and_step_only(inputs: Path, tmp_path: Path) -> None:
    encode_latents(encoding_options(inputs, tmp_path, flip=True), Placement(), SILENT_CONSOLE)
    data = LatentFolder(tmp_path).load(3)
    complete = data.batch(5, 4, 0, 1)
    parts = [data.batch(5, 4, rank, 2) for rank in (0, 1)]
    assert complete.x.equal(torch.cat([part.x for part in parts]))
    assert complete.prompts == parts[0].prompts + parts[1].prompts
    assert complete.x.equal(LatentFolder(tmp_path).load(3).batch(5, 4, 0, 1).x)
    all_latents = torch.cat([data.batch(step, 7, 0, 1).x for step in range(8)])
    assert len({row.numpy().tobytes() for row in all_latents}) == 14  # both views of all seven


def test_latents_too_large_for_memory_are_read_from_disk(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_latents(encoding_options(inputs, tmp_path), Placement(), SILENT_CONSOLE)
    cached = LatentFolder(tmp_path).load(0).batch(0, 7, 0, 1).x
    monkeypatch.setattr("tastemaker.data.latents.MAX_CACHED_BYTES", 0)
    assert LatentFolder(tmp_path).load(0).batch(0, 7, 0, 1).x.equal(cached)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vae": "other"}, "another 'autoencoder'"),
        ({"images": "captioned"}, "another 'images'"),
        ({"size": 8}, "another 'image_size'"),
        ({"flip": True}, "another 'views'"),
    ],
)
def test_resuming_with_other_options_is_refused(
    options: dict[str, object], message: str, inputs: Path, tmp_path: Path
) -> None:
    encode_latents(encoding_options(inputs, tmp_path), Placement(), SILENT_CONSOLE)
    with pytest.raises(ConfigError, match=message):
        encode_latents(encoding_options(inputs, tmp_path, **options), Placement(), SILENT_CONSOLE)  # type: ignore[arg-type]


def test_latents_of_changed_images_are_refused(inputs: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    save_image(torch.rand(1, 3, 16, 16), images / "a.png")
    nested_options = LatentEncodingOptions(images, str(inputs / "vae.safetensors"), images / "latents", 16)
    encode_latents(nested_options, Placement(), SILENT_CONSOLE)
    assert len(LatentFolder(images / "latents").load(0)) == 1  # latents are not images
    shutil.rmtree(images / "latents")
    options = replace(nested_options, out=tmp_path / "latents")
    encode_latents(options, Placement(), SILENT_CONSOLE)
    LatentFolder(tmp_path / "latents").load(0)
    save_image(torch.rand(1, 3, 16, 16), images / "b.png")
    with pytest.raises(ConfigError, match=r"encode it again.*TM199"):
        LatentFolder(tmp_path / "latents").load(0)
    with pytest.raises(ConfigError, match=r"started with another 'images'.*TM161"):
        encode_latents(options, Placement(), SILENT_CONSOLE)
    shutil.rmtree(images)
    assert len(LatentFolder(tmp_path / "latents").load(0)) == 1  # deleted images cannot be compared


def run_overrides(inputs: Path, latents: Path, *options: str) -> list[str]:
    return [
        *(
            f"model.autoencoder={inputs / 'vae.safetensors'}",
            "model.latent_channels=4",
            "model.downsample_factor=4",
            "model.image_size=16",
        ),
        *("model.width=16", "model.depth=1", "model.heads=2", "batch.prompts=4", "steps=2", "sample.every=0"),
        *("engine={device: cpu, precision: fp32, compile: false}", "checkpoint.every=2"),
        *(f"data={{type: latent_folder, path: {latents}}}", *options),
    ]


def test_training_on_latents_matches_training_on_images(inputs: Path, tmp_path: Path) -> None:
    encode_latents(encoding_options(inputs, tmp_path / "latents", "captioned"), Placement(), SILENT_CONSOLE)
    config = load("dit-folder-text", run_overrides(inputs, tmp_path / "latents", "objective.prompt_dropout=0"))
    run = build(config, tmp_path / "run")
    events = [event for event in train(run) if isinstance(event, StepCompleted)]
    assert len(events) == 2
    collection = f"data={{type: image_collection, path: {inputs / 'captioned'}, image_size: 16}}"
    other = build(
        load(
            "dit-folder-text", [*run_overrides(inputs, tmp_path / "latents", "objective.prompt_dropout=0"), collection]
        )
    )
    batch, decoded_names = run.data.batch(0, 4, 0, 1), other.data.batch(0, 4, 0, 1)
    assert batch.prompts == decoded_names.prompts
    torch.testing.assert_close(
        run.policy.model.from_latents(batch), other.policy.encode(decoded_names.pixels), rtol=0, atol=0.02
    )  # type: ignore[attr-defined]


def test_latents_of_another_autoencoder_are_refused(inputs: Path, tmp_path: Path) -> None:
    encode_latents(encoding_options(inputs, tmp_path / "latents"), Placement(), SILENT_CONSOLE)
    other = f"model.autoencoder={inputs / 'other.safetensors'}"
    run = build(load("dit-folder", run_overrides(inputs, tmp_path / "latents", other)), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"encode the images again.*TM443"):
        list(train(run))


def test_encode_command_reports_results_and_mistakes(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["encode", str(inputs / "captioned"), "--size", "16", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="0"):
        main([*options, "--vae", str(inputs / "vae.safetensors"), "--device", "cpu"])
    assert "latents of 7 images" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/latents.json").read_text())["caption_source"] == "caption"
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    assert load_file(shard)["latents"].dtype == torch.float16
    for extra, fragment in (
        ([], "either --tokenizer"),
        (["--vae", str(inputs / "vae.safetensors"), "--views", "ten-crop"], "TM070"),
        (["--vae", str(inputs / "vae.safetensors"), "--size", "18"], "multiple of 4"),
    ):
        with pytest.raises(SystemExit):
            main([*options, *extra])
        assert fragment in " ".join(capsys.readouterr().err.split())
