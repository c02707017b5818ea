"""Pictures and tokens with their classes: from folders, from data sets on disk, and with some of them broken."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import ImageBatch, Placement, TokenBatch
from tastemaker.data.class_images import ClassPictures
from tastemaker.data.tokens import CodeFolder
from tastemaker.models.llamagen.model import Llamagen
from tastemaker.objectives.cca import CCA
from tastemaker.objectives.likelihood import Likelihood

SHADES = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0)]


def picture(number: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.new("RGB", size, SHADES[number % len(SHADES)])


def as_png(number: int) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "PNG")
    return file.getvalue()


def by_folders(path: Path, names: tuple[str, ...] = ("n01440764", "n02099601"), each: int = 3) -> Path:
    for label, name in enumerate(names):
        (path / name).mkdir(parents=True)
        for i in range(each):
            picture(label).save(path / name / f"{i}.png")
    return path


def seen(batch: ImageBatch) -> set[tuple[str, int]]:
    """What is said of each picture, and its strongest colour."""
    colours = batch.pixels[:, 0].mean((2, 3)).argmax(1).tolist()
    return set(zip(batch.prompts, colours, strict=True))


def test_folders_named_by_wordnet_are_classes_of_imagenet(tmp_path: Path) -> None:
    data = ClassPictures(by_folders(tmp_path / "a"), 16).load(0)
    batch = data.batch(0, 6, 0, 1)
    assert batch.pixels.shape == (6, 1, 3, 16, 16) and batch.pixels.max() <= 1
    assert seen(batch) == {("tench", 0), ("golden retriever", 1)}
    numbered = ClassPictures(tmp_path / "a", 16, say="number").load(0)
    assert seen(numbered.batch(0, 6, 0, 1)) == {("0", 0), ("207", 1)}
    assert data.first(3).prompts == ("tench", "golden retriever", "tench")


def test_other_folders_are_named_and_numbered_as_they_come(tmp_path: Path) -> None:
    path = by_folders(tmp_path / "a", ("black_cat", "dog"))
    assert seen(ClassPictures(path, 16).load(0).batch(0, 6, 0, 1)) == {("black cat", 0), ("dog", 1)}
    assert seen(ClassPictures(path, 16, say="number").load(0).batch(0, 6, 0, 1)) == {("0", 0), ("1", 1)}


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    path = by_folders(tmp_path / "a", ("cat", "dog"))
    (path / ".ipynb_checkpoints").mkdir()
    assert seen(ClassPictures(path, 16, say="number").load(0).batch(0, 6, 0, 1)) == {("0", 0), ("1", 1)}


def test_the_shares_of_all_ranks_are_the_batch_of_one(tmp_path: Path) -> None:
    data = ClassPictures(by_folders(tmp_path / "a"), 16).load(3)
    whole = data.batch(5, 4, 0, 1)
    shares = [data.batch(5, 4, rank, 2) for rank in range(2)]
    assert torch.equal(whole.pixels, torch.cat([share.pixels for share in shares]))
    assert whole.prompts == shares[0].prompts + shares[1].prompts


def hub(path: Path, columns: dict[str, list[Any]], features: Any = None, split: str | None = "train") -> Path:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(columns, features=features)
    (datasets.DatasetDict({split: table}) if split else table).save_to_disk(str(path))
    return path


@pytest.mark.parametrize(
    ("column", "label"),
    [("image", "label"), ("image", "labels"), ("image_path", "label"), ("file", "labels"), ("filepath", "label")],
)
def test_data_sets_on_disk_are_read_by_their_usual_columns(column: str, label: str, tmp_path: Path) -> None:
    for i in range(2):
        picture(i).save(tmp_path / f"{i}.png")
    named = [str(tmp_path / f"{i}.png") for i in range(2)]
    values = [{"bytes": as_png(i), "path": None} for i in range(2)] if column == "image" else named
    path = hub(tmp_path / "set", {column: values, label: [4, 7]})
    assert seen(ClassPictures(path, 16).load(0).batch(0, 2, 0, 1)) == {("4", 0), ("7", 1)}


def test_pictures_and_names_of_classes_in_a_data_set_are_its_own(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    path = hub(tmp_path / "set", {"image": [picture(0), picture(1)], "label": [1, 0]}, features, split=None)
    assert seen(ClassPictures(path, 16).load(0).batch(0, 2, 0, 1)) == {("dog", 0), ("cat", 1)}


def test_a_split_and_columns_that_are_not_there_are_sentences(tmp_path: Path) -> None:
    path = hub(tmp_path / "set", {"img": ["x"], "label": [1]})
    with pytest.raises(ConfigError, match="has the columns img, label; expected one of image, image_path"):
        ClassPictures(path, 16).load(0)
    with pytest.raises(ConfigError, match="has no 'validation'; there are train"):
        ClassPictures(path, 16, split="validation").load(0)
    plain = hub(tmp_path / "plain", {"image": ["x"], "label": [1]}, split=None)
    with pytest.raises(ConfigError, match="is one data set without splits, found 'test'; leave it out"):
        ClassPictures(plain, 16, split="test").load(0)
    with pytest.raises(ConfigError, match="there is no such folder"):
        ClassPictures(tmp_path / "nowhere", 16).load(0)
    with pytest.raises(ConfigError, match=r"is no readable data set .* or has no rows"):
        ClassPictures(hub(tmp_path / "empty", {"image": [], "label": []}), 16).load(0)


def broken(tmp_path: Path) -> Path:
    """Three of six cannot be used."""
    whole = [as_png(i) for i in range(6)]
    whole[1], whole[4] = whole[1][:60], b"no picture"
    rows = [{"bytes": data, "path": None} for data in whole]
    return hub(tmp_path / "set", {"image": rows, "label": [0, 1, -1, 3, 4, 5]})


def test_broken_rows_are_named_counted_and_skipped(tmp_path: Path) -> None:
    data = ClassPictures(broken(tmp_path), 16, skip=3).load(0)
    with pytest.warns(UserWarning, match=r"row \d of .* is skipped") as told:
        batch = data.batch(0, 6, 0, 1)
    assert len(told) == 3 and "3 of 3" in str(told[-1].message)
    data.skipped.add(1, "row 1", ValueError("met by another thread"))  # told of once, or the warning would be an error
    assert seen(batch) == {("0", 0), ("3", 0), ("5", 1)}  # in the place of each comes the next
    assert data.first(6).prompts == ("0", "1", "3", "4", "5", "0")


@pytest.mark.filterwarnings("ignore")
def test_what_stands_in_for_a_broken_row_does_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    path = broken(tmp_path)
    data = ClassPictures(path, 16, skip=3).load(0)
    first = [data.batch(step, 4, 0, 1) for step in range(4)]
    resumed = ClassPictures(path, 16, skip=3).load(0)
    for step in (3, 1):
        again = resumed.batch(step, 4, 0, 1)
        assert again.prompts == first[step].prompts and torch.equal(again.pixels, first[step].pixels)


@pytest.mark.filterwarnings("ignore")
def test_one_more_broken_row_than_borne_is_an_error(tmp_path: Path) -> None:
    data = ClassPictures(broken(tmp_path), 16, skip=2).load(0)
    with pytest.raises(ConfigError, match=r"cannot be used \(.*\), and 2 rows before it were skipped; .* above 2"):
        data.batch(0, 6, 0, 1)
    none = ClassPictures(tmp_path / "set", 16).load(0)
    with pytest.raises(ConfigError, match=r"data\.skip above 0"):
        none.batch(0, 6, 0, 1)


def codes(path: Path, views: int = 2, shift: int = 0) -> Path:
    for end in ("codes", "labels"):
        (path / f"imagenet32_{end}").mkdir(parents=True)
    for i in range(4):
        ids = np.arange(views)[:, None] * 10 + i + shift + np.zeros((1, 16), dtype=np.int64)
        np.save(path / "imagenet32_codes" / f"{i}.npy", ids[None])
        np.save(path / "imagenet32_labels" / f"{i}.npy", np.array([i]))
    return path


def test_tokens_are_read_with_one_of_their_views(tmp_path: Path) -> None:
    data = CodeFolder(codes(tmp_path / "a"), say="number").load(0)
    views = set()
    for step in range(20):
        batch = data.batch(step, 4, 0, 1)
        assert isinstance(batch, TokenBatch) and batch.ids.shape == (4, 16) and batch.ids.dtype == torch.int64
        assert [str(int(row[0]) % 10) for row in batch.ids] == list(batch.prompts)
        views |= {int(row[0]) // 10 for row in batch.ids}
        halves = [data.batch(step, 4, rank, 2) for rank in range(2)]
        assert torch.equal(batch.ids, torch.cat([half.ids for half in halves]))
    assert views == {0, 1}


def test_of_pictures_cut_twice_either_cut_is_taken(tmp_path: Path) -> None:
    codes(tmp_path / "a"), codes(tmp_path / "a_105", shift=100)
    data = CodeFolder(tmp_path / "a").load(0)
    ids = torch.cat([data.batch(step, 4, 0, 1).ids[:, 0] for step in range(50)])
    assert 0.3 < (ids >= 100).float().mean() < 0.7


@pytest.mark.filterwarnings("ignore")
def test_files_that_are_no_tokens_are_skipped_and_never_run(tmp_path: Path) -> None:
    path = codes(tmp_path / "a")
    np.save(path / "imagenet32_codes" / "1.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(path / "imagenet32_labels" / "2.npy", np.array([5000]))
    assert {*CodeFolder(path, skip=2, say="number").load(0).batch(0, 4, 0, 1).prompts} == {"0", "3"}
    with pytest.raises(ConfigError, match=r"imagenet32_codes/\d\.npy cannot be used"):
        CodeFolder(path).load(0).batch(0, 4, 0, 1)


def test_a_folder_without_codes_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 0 folders of codes and 0 of labels; expected one of each"):
        CodeFolder(tmp_path).load(0)


def test_a_generator_learns_from_tokens_alone(tmp_path: Path) -> None:
    import toys

    from tastemaker.core.policy import Policy
    from tastemaker.core.weights import FullFinetuning
    from tastemaker.processes.autoregressive import AutoregressiveProcess

    model = Llamagen().tiny().load(Placement())
    generator: Policy[Any] = Policy(model, AutoregressiveProcess(), FullFinetuning().apply(model, ()))
    data = CodeFolder(codes(tmp_path / "a", views=1)).load(0)
    batches: list[Any] = [data.batch(step, 8, 0, 1) for step in range(40)]
    toys.fit(generator, Likelihood(drop=0.0), batches, 1e-2)
    cond = generator.embed(["0", "1", "2", "3"])
    ids = torch.arange(4)[:, None].expand(4, 16)
    logits = generator.model.predict(ids, torch.ones(4), cond)
    assert torch.equal(logits.argmax(-1), ids)


def test_tokens_of_another_length_or_codebook_are_refused(tmp_path: Path) -> None:
    import toys

    from tastemaker.core.policy import Policy
    from tastemaker.core.weights import FullFinetuning
    from tastemaker.processes.autoregressive import AutoregressiveProcess

    model = Llamagen().tiny().load(Placement())
    generator: Policy[Any] = Policy(model, AutoregressiveProcess(), FullFinetuning().apply(model, ()))
    wrong: list[Any] = [TokenBatch(("1", "2"), torch.zeros(2, 9, dtype=torch.long))]
    with pytest.raises(ConfigError, match="a picture has 9 tokens, the model writes 16"):
        toys.fit(generator, Likelihood(), wrong, 1e-2)
    others: list[Any] = [TokenBatch(("1", "2"), torch.full((2, 16), 64))]
    for objective in (Likelihood(), CCA()):
        with pytest.raises(ConfigError, match="has the token 64, the model 64 codes, from 0 on; encode by the model's"):
            toys.fit(generator, objective, others, 1e-2)
