"""Images and tokens with classes: from folders, from saved datasets, and with broken samples."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tastemaker
from tastemaker.config.build import adopt_class_names
from tastemaker.config.load import load
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import ImageBatch, Placement, TokenBatch
from tastemaker.data.class_labels import imagenet_labels
from tastemaker.data.images import ClassImages, class_captions
from tastemaker.data.tokens import TokenFolder
from tastemaker.models.llamagen.model import LlamagenSpec
from tastemaker.objectives.cca import CCA
from tastemaker.objectives.likelihood import Likelihood
from tastemaker.training.loop import train_step

SHADES = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0)]


def colored_image(number: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.new("RGB", size, SHADES[number % len(SHADES)])


def encode_png(number: int) -> bytes:
    file = io.BytesIO()
    colored_image(number).save(file, "PNG")
    return file.getvalue()


def write_class_folders(path: Path, names: tuple[str, ...] = ("n01440764", "n02099601"), per_class: int = 3) -> Path:
    for label, name in enumerate(names):
        (path / name).mkdir(parents=True)
        for i in range(per_class):
            colored_image(label).save(path / name / f"{i}.png")
    return path


def captions_and_colors(batch: ImageBatch) -> set[tuple[str, int]]:
    """The caption and the strongest color channel of each image."""
    colours = batch.pixels[:, 0].mean((2, 3)).argmax(1).tolist()
    return set(zip(batch.prompts, colours, strict=True))


def test_wordnet_folders_get_imagenet_names_and_ids(tmp_path: Path) -> None:
    data = ClassImages(write_class_folders(tmp_path / "a"), 16).load(0)
    batch = data.batch(0, 6, 0, 1)
    assert batch.pixels.shape == (6, 1, 3, 16, 16) and batch.pixels.max() <= 1
    assert captions_and_colors(batch) == {("tench", 0), ("golden retriever", 1)}
    numbered = ClassImages(tmp_path / "a", 16, caption_source="class_id").load(0)
    assert captions_and_colors(numbered.batch(0, 6, 0, 1)) == {("0", 0), ("207", 1)}
    assert data.first_prompts(3).prompts == ("tench", "golden retriever", "tench")


def test_other_folders_get_their_names_and_positions(tmp_path: Path) -> None:
    path = write_class_folders(tmp_path / "a", ("black_cat", "dog"))
    assert captions_and_colors(ClassImages(path, 16).load(0).batch(0, 6, 0, 1)) == {("black cat", 0), ("dog", 1)}
    assert captions_and_colors(ClassImages(path, 16, caption_source="class_id").load(0).batch(0, 6, 0, 1)) == {
        ("0", 0),
        ("1", 1),
    }


def test_hidden_folders_are_ignored(tmp_path: Path) -> None:
    path = write_class_folders(tmp_path / "a", ("cat", "dog"))
    (path / ".ipynb_checkpoints").mkdir()
    assert captions_and_colors(ClassImages(path, 16, caption_source="class_id").load(0).batch(0, 6, 0, 1)) == {
        ("0", 0),
        ("1", 1),
    }


def test_rank_shards_concatenate_to_the_batch(tmp_path: Path) -> None:
    data = ClassImages(write_class_folders(tmp_path / "a"), 16).load(3)
    whole = data.batch(5, 4, 0, 1)
    shares = [data.batch(5, 4, rank, 2) for rank in range(2)]
    assert torch.equal(whole.pixels, torch.cat([share.pixels for share in shares]))
    assert whole.prompts == shares[0].prompts + shares[1].prompts


def save_hf_dataset(
    path: Path, columns: dict[str, list[Any]], features: Any = None, split: str | None = "train"
) -> Path:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(columns, features=features)
    (datasets.DatasetDict({split: table}) if split else table).save_to_disk(str(path))
    return path


@pytest.mark.parametrize(
    ("column", "label"),
    [("image", "label"), ("image", "labels"), ("image_path", "label"), ("file", "labels"), ("filepath", "label")],
)
def test_saved_datasets_are_read_by_common_column_names(column: str, label: str, tmp_path: Path) -> None:
    for i in range(2):
        colored_image(i).save(tmp_path / f"{i}.png")
    named = [str(tmp_path / f"{i}.png") for i in range(2)]
    values = [{"bytes": encode_png(i), "path": None} for i in range(2)] if column == "image" else named
    path = save_hf_dataset(tmp_path / "set", {column: values, label: [4, 7]})
    assert captions_and_colors(ClassImages(path, 16).load(0).batch(0, 2, 0, 1)) == {("4", 0), ("7", 1)}


def test_saved_datasets_keep_their_class_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    path = save_hf_dataset(
        tmp_path / "set", {"image": [colored_image(0), colored_image(1)], "label": [1, 0]}, features, split=None
    )
    assert captions_and_colors(ClassImages(path, 16).load(0).batch(0, 2, 0, 1)) == {("dog", 0), ("cat", 1)}


def test_model_takes_class_names_of_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["oak_leaf", "rune"])})
    path = save_hf_dataset(
        tmp_path / "set", {"image": [colored_image(0), colored_image(1)], "label": [1, 0]}, features, split=None
    )
    settings = [f"data={{type: class_images, path: {path}, image_size: 32}}", "sample.every=0", "guard.every=0"]
    config = load(
        "grpo-llamagen-tf", [*settings, "engine.precision=fp32", "batch.prompts=2", "batch.minibatches=1", "steps=1"]
    )
    with pytest.warns(UserWarning, match=r"model\.class_names.*oak leaf.*TM862"):
        run = tastemaker.build(config, tmp_path / "run", tiny=True)
    assert run.config.model.class_names[:3] == ("oak leaf", "rune", "2")  # saved with the run, so `generate` knows them
    assert run.policy.embed(["rune", "a photo of a oak leaf", "7"]).tensors["label"].tolist() == [1, 0, 7]
    assert train_step(run, 0).to_event().metrics["reward/mean"] < 0
    with pytest.raises(ConfigError, match=r"model\.num_classes.*TM861"):
        adopt_class_names(replace(config, model=replace(config.model, num_classes=1)))
    known = save_hf_dataset(
        tmp_path / "known",
        {"image": [colored_image(0)], "label": [0]},
        datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["tench"])}),
    )
    config = replace(config, data=ClassImages(known, 32))
    assert adopt_class_names(config) is config  # ImageNet's own names stay ImageNet's classes


def test_a_thousand_names_are_imagenet_only_if_they_are_its_names() -> None:
    own = [f"part {i}" for i in range(1000)]
    assert class_captions(own, "class_name") == tuple(own)
    published = [", ".join(names) for names in imagenet_labels().names]  # as the hub's imagenet-1k has them
    assert class_captions(published, "class_name")[207] == imagenet_labels().name(207)


def test_missing_split_or_columns_are_refused(tmp_path: Path) -> None:
    path = save_hf_dataset(tmp_path / "set", {"img": ["x"], "label": [1]})
    with pytest.raises(ConfigError, match=r"img, label.*image, image_path"):
        ClassImages(path, 16).load(0)
    with pytest.raises(ConfigError, match=r"'validation'.* train"):
        ClassImages(path, 16, split="validation").load(0)
    plain = save_hf_dataset(tmp_path / "plain", {"image": ["x"], "label": [1]}, split=None)
    with pytest.raises(ConfigError, match="'test'"):
        ClassImages(plain, 16, split="test").load(0)
    with pytest.raises(ConfigError, match="no such folder"):
        ClassImages(tmp_path / "nowhere", 16).load(0)
    with pytest.raises(ConfigError, match=r"cannot be loaded as a data set .*TM155"):
        ClassImages(save_hf_dataset(tmp_path / "empty", {"image": [], "label": []}), 16).load(0)


def write_broken_dataset(tmp_path: Path) -> Path:
    """A dataset of six samples, three of which are broken."""
    whole = [encode_png(i) for i in range(6)]
    whole[1], whole[4] = whole[1][:60], b"no picture"
    rows = [{"bytes": data, "path": None} for data in whole]
    return save_hf_dataset(tmp_path / "set", {"image": rows, "label": [0, 1, -1, 3, 4, 5]})


def test_broken_samples_are_reported_and_skipped(tmp_path: Path) -> None:
    data = ClassImages(write_broken_dataset(tmp_path), 16, max_skipped=3).load(0)
    with pytest.warns(UserWarning, match=r"row \d of .* is skipped.*TM192") as warned:
        batch = data.batch(0, 6, 0, 1)
    assert len(warned) == 3 and "3 of 3" in str(warned[-1].message)
    data.skipped.add(
        1, "row 1", ValueError("met by another thread")
    )  # reported once; a second warning would be an error
    assert captions_and_colors(batch) == {("0", 0), ("3", 0), ("5", 1)}  # in the place of each comes the next
    assert data.first_prompts(6).prompts == ("0", "1", "3", "4", "5", "0")


@pytest.mark.filterwarnings("ignore")
def test_replacement_of_a_broken_sample_is_deterministic(tmp_path: Path) -> None:
    path = write_broken_dataset(tmp_path)
    data = ClassImages(path, 16, max_skipped=3).load(0)
    first = [data.batch(step, 4, 0, 1) for step in range(4)]
    resumed = ClassImages(path, 16, max_skipped=3).load(0)
    for step in (3, 1):
        again = resumed.batch(step, 4, 0, 1)
        assert again.prompts == first[step].prompts and torch.equal(again.pixels, first[step].pixels)


@pytest.mark.filterwarnings("ignore")
def test_more_broken_samples_than_max_skipped_are_an_error(tmp_path: Path) -> None:
    data = ClassImages(write_broken_dataset(tmp_path), 16, max_skipped=2).load(0)
    with pytest.raises(ConfigError, match=r"cannot be used \(.*\), and 2 samples before it were skipped; .* above 2"):
        data.batch(0, 6, 0, 1)
    none = ClassImages(tmp_path / "set", 16).load(0)
    with pytest.raises(ConfigError, match=r"max_skipped above 0"):
        none.batch(0, 6, 0, 1)


def write_codes(path: Path, views: int = 2, shift: int = 0) -> Path:
    for end in ("codes", "labels"):
        (path / f"imagenet32_{end}").mkdir(parents=True)
    for i in range(4):
        ids = np.arange(views)[:, None] * 10 + i + shift + np.zeros((1, 16), dtype=np.int64)
        np.save(path / "imagenet32_codes" / f"{i}.npy", ids[None])
        np.save(path / "imagenet32_labels" / f"{i}.npy", np.array([i]))
    return path


def test_token_batches_draw_one_view_per_image(tmp_path: Path) -> None:
    data = TokenFolder(write_codes(tmp_path / "a"), caption_source="class_id").load(0)
    views = set()
    for step in range(20):
        batch = data.batch(step, 4, 0, 1)
        assert isinstance(batch, TokenBatch) and batch.ids.shape == (4, 16) and batch.ids.dtype == torch.int64
        assert [str(int(row[0]) % 10) for row in batch.ids] == list(batch.prompts)
        views |= {int(row[0]) // 10 for row in batch.ids}
        halves = [data.batch(step, 4, rank, 2) for rank in range(2)]
        assert torch.equal(batch.ids, torch.cat([half.ids for half in halves]))
    assert views == {0, 1}


def test_tokens_of_a_sibling_folder_are_mixed_in(tmp_path: Path) -> None:
    write_codes(tmp_path / "a"), write_codes(tmp_path / "a_105", shift=100)
    data = TokenFolder(tmp_path / "a").load(0)
    ids = torch.cat([data.batch(step, 4, 0, 1).ids[:, 0] for step in range(50)])
    assert 0.3 < (ids >= 100).float().mean() < 0.7


@pytest.mark.filterwarnings("ignore")
def test_invalid_token_files_are_skipped_and_not_unpickled(tmp_path: Path) -> None:
    path = write_codes(tmp_path / "a")
    np.save(path / "imagenet32_codes" / "1.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(path / "imagenet32_labels" / "2.npy", np.array([5000]))
    assert {*TokenFolder(path, max_skipped=2, caption_source="class_id").load(0).batch(0, 4, 0, 1).prompts} == {
        "0",
        "3",
    }
    with pytest.raises(ConfigError, match=r"TM242"):
        TokenFolder(path).load(0).batch(0, 4, 0, 1)


def test_folder_with_no_codes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 folders of codes.*TM245"):
        TokenFolder(tmp_path).load(0)


def test_generator_trains_on_precomputed_tokens(tmp_path: Path) -> None:
    import toys

    from tastemaker.core.policy import Policy
    from tastemaker.core.weights import FullFinetuning
    from tastemaker.processes.autoregressive import AutoregressiveProcess

    model = LlamagenSpec().tiny().load(Placement())
    generator: Policy[Any] = Policy(model, AutoregressiveProcess(), FullFinetuning().apply(model, ()))
    data = TokenFolder(write_codes(tmp_path / "a", views=1)).load(0)
    batches: list[Any] = [data.batch(step, 8, 0, 1) for step in range(40)]
    toys.train(generator, Likelihood(prompt_dropout=0.0), batches, 1e-2)
    cond = generator.embed(["0", "1", "2", "3"])
    ids = torch.arange(4)[:, None].expand(4, 16)
    logits = generator.model.predict(ids, torch.ones(4), cond)
    assert torch.equal(logits.argmax(-1), ids)


def test_tokens_of_another_length_or_codebook_are_refused(tmp_path: Path) -> None:
    import toys

    from tastemaker.core.policy import Policy
    from tastemaker.core.weights import FullFinetuning
    from tastemaker.processes.autoregressive import AutoregressiveProcess

    model = LlamagenSpec().tiny().load(Placement())
    generator: Policy[Any] = Policy(model, AutoregressiveProcess(), FullFinetuning().apply(model, ()))
    wrong: list[Any] = [TokenBatch(("1", "2"), torch.zeros(2, 9, dtype=torch.long))]
    with pytest.raises(ConfigError, match=r"9 tokens, the model generates 16.*TM306"):
        toys.train(generator, Likelihood(), wrong, 1e-2)
    others: list[Any] = [TokenBatch(("1", "2"), torch.full((2, 16), 64))]
    for objective in (Likelihood(), CCA()):
        with pytest.raises(ConfigError, match=r"has the token 64.*TM307"):
            toys.train(generator, objective, others, 1e-2)
