"""Published layouts of preference pairs: lists, JSON lines, mixtures and folders; and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tastemaker.core.registry import ConfigError
from tastemaker.data.image_io import save_image
from tastemaker.data.pairs import PairFile, PairFolder
from tastemaker.data.text_files import read_mixture, sample_rows


def save_gray_image(path: Path, shade: float, size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_image(torch.full((1, 3, size, size), shade), path)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Two pairs as Image-Generation-CoT lists them."""
    for name, shade in (("good", 1.0), ("bad", 0.0)):
        save_gray_image(tmp_path / "images" / f"{name}.png", shade)
    both = {"chosen": "images/good.png", "rejected": "images/bad.png"}
    (tmp_path / "dpo.json").write_text(json.dumps([{"prompt": f"photo {i}", **both} for i in range(4)]))
    return tmp_path


def test_json_list_equals_jsonl(published: Path) -> None:
    rows = json.loads((published / "dpo.json").read_text())
    (published / "dpo.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one, other = (PairFile(published / f"dpo.{kind}").load(0).batch(0, 4, 0, 1) for kind in ("json", "jsonl"))
    assert one.prompts == other.prompts and torch.equal(one.chosen, other.chosen)
    assert float(one.chosen.mean()) == 1 and float(one.rejected.mean()) == 0


def test_image_dir_sets_the_base_of_paths(published: Path) -> None:
    (published / "lists").mkdir()
    (published / "dpo.json").rename(published / "lists/dpo.json")
    assert len(PairFile(published / "lists/dpo.json", image_dir=published).load(0)) == 4
    with pytest.raises(ConfigError, match=r"row 1: the file .*good\.png.*TM234"):
        PairFile(published / "lists/dpo.json").load(0)


def test_mixture_applies_sampling_strategies(published: Path) -> None:
    counts = [("first:3", 3), ("end:1", 1), ("random:50%", 2), ("all", 4)]
    (published / "mix.yaml").write_text(
        "datasets:\n" + "".join(f"  - {{json_path: dpo.json, sampling_strategy: '{share}'}}\n" for share, _ in counts)
    )
    pairs = read_mixture(published / "mix.yaml", 0)
    assert len(pairs) == sum(count for _, count in counts)
    assert [line.get_text("prompt") for line in pairs[:4]] == ["photo 0", "photo 1", "photo 2", "photo 3"]
    assert pairs == read_mixture(published / "mix.yaml", 0) and len(PairFile(published / "mix.yaml").load(0)) == 10


def test_sampling_percentages_are_rounded_up() -> None:
    assert sample_rows(range(10), "first:25%", 0, "") == [0, 1, 2]
    assert sample_rows(range(3), "end:5", 0, "") == [0, 1, 2]
    assert sorted(sample_rows(range(3), "random:100%", 0, "")) == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"sampling_strategy is 'half'.*TM235"):
        sample_rows(range(3), "half", 0, "mix.yaml")


def test_pair_folder_matches_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_gray_image(tmp_path / "chosen" / f"{name}.png", 1.0)
        save_gray_image(tmp_path / "rejected" / f"{name}.png", 0.0)
        (tmp_path / f"{name}.txt").write_text(f"prompt {name}\n")
    batch = PairFolder(tmp_path).load(0).batch(0, 2, 0, 1)
    assert sorted(batch.prompts) == ["prompt a", "prompt b"]
    assert float(batch.chosen.mean()) == 1 and float(batch.rejected.mean()) == 0
    (tmp_path / "rejected/b.png").unlink()
    with pytest.raises(ConfigError, match=r"b.*TM203"):
        PairFolder(tmp_path).load(0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dpo.json", "{", "not JSON"),
        ("dpo.json", '{"prompt": "a"}', "expected a list of objects, got dict"),
        ("dpo.json", "[]", "expected a list of objects"),
        ("dpo.json", '[{"prompt": "a"}]', "row 1: 'chosen' is missing; found prompt"),
        ("dpo.json", '[{"prompt": "a", "chosen": 3}]', "row 1: 'chosen' is 3; expected text"),
        ("mix.yaml", "datasets: []", "`datasets:` .*TM239"),
        ("mix.yaml", "datasets: [3]", "got 3.*TM240"),
        ("mix.yaml", "datasets: [{json_path: none.json}]", r"the file .*none\.json"),
        ("mix.yaml", "a: [", "TM064"),
    ],
)
def test_unreadable_pair_files_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        PairFile(tmp_path / name).load(0)


def test_pair_of_different_sizes_is_refused(published: Path) -> None:
    save_gray_image(published / "images/bad.png", 0.0, 9)
    data = PairFile(published / "dpo.json").load(0)
    with pytest.raises(
        ConfigError, match=r"row \d: bad\.png has 1 frames of 9x9 pixels, but .*good\.png .* data\.image_size.*TM190"
    ):
        data.batch(0, 1, 0, 1)
    assert PairFile(published / "dpo.json", image_size=8).load(0).batch(0, 1, 0, 1).rejected.shape[-1] == 8


def test_pair_file_defaults_to_examples() -> None:
    batch = PairFile(image_size=16).load(0).batch(0, 3, 0, 1)
    assert len(set(batch.prompts)) == 3 and not torch.equal(batch.chosen, batch.rejected)
