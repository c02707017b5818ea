"""Latents of pictures are cached in shards, the same on any number of ranks; what is stale is refused."""

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

QUIET = Console(quiet=True)
SMALL = {"type": "vae", "latent_channels": 4, "width": 8, "downsample_factor": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven pictures of two classes, the same with captions, and two autoencoders."""
    folder = tmp_path_factory.mktemp("latents")
    torch.manual_seed(0)
    for i in range(7):
        picture = torch.rand(1, 3, 20, 24)
        for place in (folder / "classes" / ("cat", "dog")[i % 2] / f"{i}.png", folder / "told" / f"{i}.png"):
            place.parent.mkdir(parents=True, exist_ok=True)
            save_image(picture, place)
        (folder / "told" / f"{i}.txt").write_text(f"picture number {i}\n")
    for name, seed in (("vae", 0), ("other", 1)):
        net = VaeSpec(4, 8, 4, seed=seed).load(Placement())
        net.measure_latents(torch.rand(8, 3, 16, 16))
        weight_files.write_weights(
            folder / f"{name}.safetensors", net.state_dict(), {"autoencoder": SMALL}, torch.float32
        )
    return folder


def order(
    place: Path, out: Path, pictures: str = "classes", vae: str = "vae", size: int = 16, **more: object
) -> LatentEncodingOptions:
    settings = {"shard_size": 3, **more}
    return LatentEncodingOptions(place / pictures, str(place / f"{vae}.safetensors"), out, size, **settings)  # type: ignore[arg-type]


def test_a_latent_is_what_the_autoencoder_says_of_the_middle_square(place: Path, tmp_path: Path) -> None:
    encode_latents(order(place, tmp_path, flip=True), Placement(), QUIET)
    found = LatentFolder(tmp_path).load(0)
    assert len(found) == 7 and found.manifest.shape == (4, 4, 4) and found.manifest.views == 2
    assert [len(shard.prompts) for shard in found.shards] == [3, 3, 1]
    net = load_autoencoder(str(place / "vae.safetensors"), Placement())
    small = center_crop(read_image(place / "classes/cat/0.png")[0], 16)[None]
    with torch.no_grad():
        wanted = net.encode(torch.cat([small, small.flip(-1)]))  # type: ignore[operator]
    assert (found.cache[0].float() - wanted).abs().max() < 0.1  # other roundings of the same pixels
    assert found.prompts == ("0",) * 4 + ("1",) * 3
    assert LatentFolder(tmp_path, caption_source="class_name").load(0).prompts == ("cat",) * 4 + ("dog",) * 3
    assert set(LatentFolder(tmp_path, caption_source="empty").load(0).prompts) == {""}


def test_captions_come_along(place: Path, tmp_path: Path) -> None:
    encode_latents(order(place, tmp_path, "told"), Placement(), QUIET)
    assert LatentFolder(tmp_path).load(0).prompts[:2] == ("picture number 0", "picture number 1")
    with pytest.raises(ConfigError, match="has no class_id"):
        LatentFolder(tmp_path, caption_source="class_id").load(0)


def test_the_deviation_is_measured_over_all_shards(place: Path, tmp_path: Path) -> None:
    encode_latents(order(place, tmp_path), Placement(), QUIET)
    found = LatentFolder(tmp_path).load(0)
    every = torch.cat([x.double().flatten() for x in found.cache])
    assert found.std == pytest.approx(float(every.std(correction=0)), rel=1e-6)


def test_ranks_write_the_same_shards_and_a_second_run_goes_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_latents(order(place, tmp_path / "whole"), Placement(), QUIET)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, there in (("1", 1), ("0", 3)):
        monkeypatch.setenv("RANK", rank)
        encode_latents(order(place, tmp_path / "shared"), Placement(), QUIET)
        assert len(list((tmp_path / "shared").glob("*.safetensors"))) == there
        if rank == "1":
            with pytest.raises(ConfigError, match="holds 1 of 3 shards"):
                LatentFolder(tmp_path / "shared").load(0)
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert names[-1] == "latents.json" and len(names) == 4
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "shared" / name).read_bytes(), name
    kept = (tmp_path / "whole" / names[0]).stat().st_mtime_ns
    (tmp_path / "whole" / names[1]).unlink()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    encode_latents(order(place, tmp_path / "whole"), Placement(), QUIET)
    assert (tmp_path / "whole" / names[1]).read_bytes() == (tmp_path / "shared" / names[1]).read_bytes()
    assert (tmp_path / "whole" / names[0]).stat().st_mtime_ns == kept


@pytest.fixture
def broken(place: Path, tmp_path: Path) -> Path:
    """The pictures with captions, two of which cannot be read and one of which has no caption."""
    folder = tmp_path / "broken"
    shutil.copytree(place / "told", folder)
    for name in ("0", "4"):
        (folder / f"{name}.png").write_bytes(b"none")
    (folder / "5.txt").unlink()
    return folder


def test_broken_pictures_are_named_counted_and_left_out(place: Path, broken: Path, tmp_path: Path) -> None:
    said = StringIO()
    asked = replace(order(place, tmp_path / "out"), images=broken, caption_source="caption")
    encode_latents(asked, Placement(), Console(file=said, width=200))
    told = said.getvalue()
    assert all(f"{name}.png cannot be " in told for name in "045") and told.count("skipped: ") == 3
    assert "latents of 4 images" in told and "3 could not be read" in told
    found = LatentFolder(tmp_path / "out").load(0)
    assert [len(shard.class_ids) for shard in found.shards] == [2, 1, 1] and len(found) == 4
    assert found.prompts == tuple(f"picture number {i}" for i in (1, 2, 3, 6))
    whole = tmp_path / "whole"
    encode_latents(replace(asked, out=whole, images=place / "told"), Placement(), QUIET)
    every = LatentFolder(whole).load(0).cache
    assert all(found._read(row, 0).equal(every[i, 0]) for row, i in enumerate((1, 2, 3, 6)))
    assert len(found.batch(0, 4, 0, 1).x) == 4


def test_one_more_than_are_borne_ends_it_and_what_was_done_stays(place: Path, broken: Path, tmp_path: Path) -> None:
    asked = replace(order(place, tmp_path / "out"), images=broken, caption_source="caption", max_skipped=1)
    with pytest.raises(ConfigError, match=r"4\.png cannot be read .*, and 1 before it; or allow more .* --skip 4"):
        encode_latents(asked, Placement(), QUIET)
    assert [file.name for file in (tmp_path / "out").glob("latents-*")] == ["latents-00000-of-00003.safetensors"]
    with pytest.raises(ConfigError, match=r"5\.png cannot be used .*, and 2 before it"):  # one was there before
        encode_latents(replace(asked, max_skipped=2), Placement(), QUIET)
    encode_latents(replace(asked, max_skipped=3), Placement(), QUIET)
    assert len(LatentFolder(tmp_path / "out").load(0)) == 4


def test_a_folder_of_nothing_usable_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(b"none")
    with pytest.raises(ConfigError, match="none of 1 images could be read"):
        encode_latents(replace(order(place, tmp_path / "out"), images=tmp_path / "pictures"), Placement(), QUIET)


def test_an_interruption_within_a_shard_costs_one_piece(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_encoding, "BATCH_SIZE", 2)
    asked, seen = order(place, tmp_path / "cut", shard_size=7), []
    encode_latents(replace(asked, out=tmp_path / "whole"), Placement(), QUIET)
    plain = decode_square

    def interrupted(encoded: object, name: str, size: int) -> torch.Tensor:
        seen.append(name)
        if len(seen) == 6:
            raise KeyboardInterrupt
        return plain(encoded, name, size)  # type: ignore[arg-type]

    monkeypatch.setattr(image_encoding, "decode_square", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode_latents(asked, Placement(), QUIET)
    assert len(list((tmp_path / "cut").glob(".*.piece"))) == 2
    encode_latents(asked, Placement(), QUIET)
    assert len(seen) == 6 + 3  # four of seven were kept
    names = sorted(file.name for file in (tmp_path / "cut").iterdir())
    assert names == ["latents-00000-of-00001.safetensors", "latents.json"]
    assert all((tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)


def test_rows_are_a_function_of_seed_and_step_on_any_number_of_ranks(place: Path, tmp_path: Path) -> None:
    encode_latents(order(place, tmp_path, flip=True), Placement(), QUIET)
    data = LatentFolder(tmp_path).load(3)
    whole = data.batch(5, 4, 0, 1)
    parts = [data.batch(5, 4, rank, 2) for rank in (0, 1)]
    assert whole.x.equal(torch.cat([part.x for part in parts]))
    assert whole.prompts == parts[0].prompts + parts[1].prompts
    assert whole.x.equal(LatentFolder(tmp_path).load(3).batch(5, 4, 0, 1).x)
    every = torch.cat([data.batch(step, 7, 0, 1).x for step in range(8)])
    assert len({row.numpy().tobytes() for row in every}) == 14  # both views of all seven


def test_rows_too_many_for_memory_are_read_one_by_one(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_latents(order(place, tmp_path), Placement(), QUIET)
    held = LatentFolder(tmp_path).load(0).batch(0, 7, 0, 1).x
    monkeypatch.setattr("tastemaker.data.latents.MAX_CACHED_BYTES", 0)
    assert LatentFolder(tmp_path).load(0).batch(0, 7, 0, 1).x.equal(held)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"vae": "other"}, "another 'autoencoder'"),
        ({"pictures": "told"}, "another 'images'"),
        ({"size": 8}, "another 'image_size'"),
        ({"flip": True}, "another 'views'"),
    ],
)
def test_what_was_begun_otherwise_is_not_gone_on_with(
    more: dict[str, object], what: str, place: Path, tmp_path: Path
) -> None:
    encode_latents(order(place, tmp_path), Placement(), QUIET)
    with pytest.raises(ConfigError, match=what):
        encode_latents(order(place, tmp_path, **more), Placement(), QUIET)  # type: ignore[arg-type]


def test_latents_of_pictures_that_changed_are_refused(place: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    save_image(torch.rand(1, 3, 16, 16), pictures / "a.png")
    inside = LatentEncodingOptions(pictures, str(place / "vae.safetensors"), pictures / "latents", 16)
    encode_latents(inside, Placement(), QUIET)
    assert len(LatentFolder(pictures / "latents").load(0)) == 1  # which are no pictures themselves
    shutil.rmtree(pictures / "latents")
    asked = replace(inside, out=tmp_path / "latents")
    encode_latents(asked, Placement(), QUIET)
    LatentFolder(tmp_path / "latents").load(0)
    save_image(torch.rand(1, 3, 16, 16), pictures / "b.png")
    with pytest.raises(ConfigError, match="encode it again"):
        LatentFolder(tmp_path / "latents").load(0)
    with pytest.raises(ConfigError, match="started with another 'images'"):
        encode_latents(asked, Placement(), QUIET)
    shutil.rmtree(pictures)
    assert len(LatentFolder(tmp_path / "latents").load(0)) == 1  # what is gone cannot have changed


def small(place: Path, latents: Path, *more: str) -> list[str]:
    return [
        *(
            f"model.autoencoder={place / 'vae.safetensors'}",
            "model.latent_channels=4",
            "model.downsample_factor=4",
            "model.image_size=16",
        ),
        *("model.width=16", "model.depth=1", "model.heads=2", "batch.prompts=4", "steps=2", "sample.every=0"),
        *("engine={device: cpu, precision: fp32, compile: false}", "checkpoint.every=2"),
        *(f"data={{type: latent_folder, path: {latents}}}", *more),
    ]


def test_a_generator_trains_from_them_as_from_pictures(place: Path, tmp_path: Path) -> None:
    encode_latents(order(place, tmp_path / "latents", "told"), Placement(), QUIET)
    config = load("dit-folder-text", small(place, tmp_path / "latents", "objective.prompt_dropout=0"))
    run = build(config, tmp_path / "run")
    events = [event for event in train(run) if isinstance(event, StepCompleted)]
    assert len(events) == 2
    gallery = f"data={{type: image_collection, path: {place / 'told'}, image_size: 16}}"
    other = build(load("dit-folder-text", [*small(place, tmp_path / "latents", "objective.prompt_dropout=0"), gallery]))
    batch, seen = run.data.batch(0, 4, 0, 1), other.data.batch(0, 4, 0, 1)
    assert batch.prompts == seen.prompts
    torch.testing.assert_close(
        run.policy.model.from_latents(batch), other.policy.encode(seen.pixels), rtol=0, atol=0.02
    )  # type: ignore[attr-defined]


def test_a_run_with_another_autoencoder_refuses_them(place: Path, tmp_path: Path) -> None:
    encode_latents(order(place, tmp_path / "latents"), Placement(), QUIET)
    other = f"model.autoencoder={place / 'other.safetensors'}"
    run = build(load("dit-folder", small(place, tmp_path / "latents", other)), tmp_path / "run")
    with pytest.raises(ConfigError, match="encode the images again"):
        list(train(run))


def test_the_command_says_what_it_did_and_what_is_wrong(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["encode", str(place / "told"), "--size", "16", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="0"):
        main([*asked, "--vae", str(place / "vae.safetensors"), "--device", "cpu"])
    assert "latents of 7 images" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/latents.json").read_text())["caption_source"] == "caption"
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    assert load_file(shard)["latents"].dtype == torch.float16
    for more, sentence in (
        ([], "either --tokenizer"),
        (["--vae", str(place / "vae.safetensors"), "--views", "ten-crop"], "choose center or flip"),
        (["--vae", str(place / "vae.safetensors"), "--size", "18"], "no multiple of 4"),
    ):
        with pytest.raises(SystemExit):
            main([*asked, *more])
        assert sentence in " ".join(capsys.readouterr().err.split())
