import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tastemaker.core.registry import ConfigError
from tastemaker.core.toy_colors import TOY_COLORS
from tastemaker.data.dataset import batch_indices
from tastemaker.data.image_io import ImageError
from tastemaker.data.images import CaptionedFolder
from tastemaker.data.pairs import PairFile
from tastemaker.data.prompts import InlinePrompts, PromptFile
from tastemaker.data.toy import ToyImages, ToyPairs

SEED = 3


@pytest.mark.parametrize("size", [1, 4, 6, 25])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rank_shards_concatenate_to_the_batch(size: int, world: int) -> None:
    for step in range(5):
        whole = batch_indices(10, SEED, step, size, 0, 1)
        shares = [batch_indices(10, SEED, step, size, rank, world) for rank in range(world)]
        assert [row for share in shares for row in share] == whole
        assert len(whole) == size


def test_epochs_visit_every_sample_once_in_new_order() -> None:
    first, second = (
        [row for step in steps for row in batch_indices(12, SEED, step, 4, 0, 1)] for steps in (range(3), range(3, 6))
    )
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_batch_larger_than_the_dataset_wraps_around() -> None:
    batch = batch_indices(3, SEED, 0, 7, 0, 1)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]


def test_order_depends_on_the_seed_only() -> None:
    assert batch_indices(50, 1, 0, 50, 0, 1) == batch_indices(50, 1, 0, 50, 0, 1)
    assert batch_indices(50, 1, 0, 50, 0, 1) != batch_indices(50, 2, 0, 50, 0, 1)


def test_batch_indices_of_a_late_step_are_fast() -> None:
    assert len(batch_indices(1000, SEED, 10**9, 4, 0, 1)) == 4


def test_inline_prompts_have_empty_metadata() -> None:
    data = InlinePrompts(("a red", "a blue")).load(SEED)
    batch = data.batch(0, 4, 0, 1)
    assert len(data) == 2 and sorted(batch.prompts) == ["a blue", "a blue", "a red", "a red"]
    assert batch.metadata == ({},) * 4
    assert data.first_prompts(3).prompts == ("a red", "a blue", "a red")


def test_text_file_has_one_prompt_per_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\ufeffa red\n\n  a blue  \r\né\n", encoding="utf-8")
    assert PromptFile(tmp_path / "p.txt").load(SEED).prompts == ("a red", "a blue", "é")


def test_other_columns_become_metadata(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a red", "count": 2}\n\n{"prompt": "a blue", "target": "x.png"}\n')
    data = PromptFile(tmp_path / "p.jsonl").load(SEED)
    assert data.prompts == ("a red", "a blue") and data.metadata == ({"count": 2}, {"target": "x.png"})
    (tmp_path / "p.csv").write_text('prompt,count\n"a red, and\nso on",2\na blue,\n')
    table = PromptFile(tmp_path / "p.csv").load(SEED)
    assert table.prompts == ("a red, and\nso on", "a blue") and table.metadata == ({"count": "2"}, {"count": ""})


@pytest.mark.parametrize(
    ("name", "text", "start", "fragment"),
    [
        ("p.txt", b"", ": ", "empty"),
        ("p.txt", b" \n\n", ": ", "empty"),
        ("p.txt", b"a red\n\xff", ": ", "byte 6"),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}', ", line 2: 'prompt'", "text"),
        ("p.jsonl", b'{"prompt": 3}', ", line 1: 'prompt'", "3"),
        ("p.jsonl", b'\n["a"]', ", line 2: ", '["a"]'),
        ("p.csv", b"text,tag\na,b\n", ", line 2: 'prompt'", "text, tag"),
        ("p.csv", b"prompt,tag\na,b,c\n", ", line 2: ", "2 columns"),
        ("p.csv", b"prompt,tag\na\n", ", line 2: ", "2 columns"),
        ("p.csv", b"prompt\n", ": ", "no rows"),
    ],
)
def test_invalid_prompt_file_error_names_the_line(
    tmp_path: Path, name: str, text: bytes, start: str, fragment: str
) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError) as error:
        PromptFile(tmp_path / name).load(SEED)
    message = str(error.value).removeprefix(str(tmp_path / name))
    assert message.startswith(start) and fragment in message


@pytest.mark.parametrize(
    ("name", "start"), [("p.jsonl", ", line 1: not JSON ("), ("none.txt", ": the file cannot be read (")]
)
def test_unreadable_prompt_file_is_refused(tmp_path: Path, name: str, start: str) -> None:
    (tmp_path / "p.jsonl").write_text("{'prompt': 1}")
    with pytest.raises(ConfigError) as error:
        PromptFile(tmp_path / name).load(SEED)
    assert str(error.value).startswith(f"{tmp_path / name}{start}")


def test_toy_images_match_their_caption() -> None:
    batch = ToyImages(num_frames=3, color_std=0.0).load(SEED).batch(0, 8, 0, 1)
    assert batch.pixels.shape == (8, 3, 3, 8, 8)
    for prompt, pixels in zip(batch.prompts, batch.pixels, strict=True):
        expected = torch.tensor(TOY_COLORS[prompt.split()[-1]])
        assert torch.equal(pixels, expected[None, :, None, None].expand_as(pixels))


def test_toy_images_vary_and_held_out_images_differ() -> None:
    seen, held = (
        ToyImages(num_samples=40, start_index=start).load(SEED).batch(0, 40, 0, 1).pixels for start in (0, 40)
    )
    shades = {tuple(pixels[0, :, 0, 0].tolist()) for pixels in torch.cat([seen, held])}
    assert len(shades) == 80
    assert seen.min() >= 0 and seen.max() <= 1


def test_toy_pairs_prefer_the_right_color() -> None:
    batch = ToyPairs(color_std=0.0).load(SEED).batch(0, 256, 0, 1)
    names = {tuple(torch.tensor(rgb).tolist()): name for name, rgb in TOY_COLORS.items()}
    chosen, rejected = (
        [names[tuple(p[0, :, 0, 0].tolist())] for p in pixels] for pixels in (batch.chosen, batch.rejected)
    )
    assert [f"a {color}" for color in chosen] == list(batch.prompts)
    used = ("red", "green", "blue", "grey")
    assert set(zip(chosen, rejected, strict=True)) == {(a, b) for a in used for b in used if a != b}


def save_solid_image(path: Path, size: tuple[int, int] = (8, 8), color: str = "red") -> None:
    Image.new("RGB", size, color).save(path)


def test_image_folder_reads_txt_captions(tmp_path: Path) -> None:
    for color in ("red", "blue"):
        save_solid_image(tmp_path / f"{color}.png", color=color)
        (tmp_path / f"{color}.txt").write_text(f"a {color}\n")
    data = CaptionedFolder(tmp_path).load(SEED)
    batch = data.batch(0, 2, 0, 1)
    assert len(data) == 2 and batch.pixels.shape == (2, 1, 3, 8, 8)
    assert torch.equal(batch.pixels[batch.prompts.index("a blue"), 0, :, 0, 0], torch.tensor([0.0, 0.0, 1.0]))


def test_image_folder_reads_metadata_jsonl(tmp_path: Path) -> None:
    save_solid_image(tmp_path / "one.png", (16, 8))
    save_solid_image(tmp_path / "two.jpg", (4, 4))
    rows = [{"file_name": "one.png", "prompt": "first"}, {"file_name": "two.jpg", "prompt": "second"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert CaptionedFolder(tmp_path, image_size=4).load(SEED).batch(0, 2, 0, 1).pixels.shape == (2, 1, 3, 4, 4)
    with pytest.raises(ConfigError, match=r"one\.png.*TM190"):
        CaptionedFolder(tmp_path).load(SEED).batch(0, 2, 0, 1)


def test_invalid_image_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder.*TM179"):
        CaptionedFolder(tmp_path / "none").load(SEED)
    with pytest.raises(ConfigError, match=r"TM196"):
        CaptionedFolder(tmp_path).load(SEED)
    save_solid_image(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"the caption of .*a\.png: the file .*a\.txt.*TM234"):
        CaptionedFolder(tmp_path).load(SEED)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.png", "prompt": "x"}')
    with pytest.raises(ConfigError, match=r"metadata\.jsonl, line 1: the file .*b\.png.*TM234"):
        CaptionedFolder(tmp_path).load(SEED)


def write_pairs(folder: Path, *lines: dict[str, Any]) -> Path:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / "pairs.jsonl"


def test_pair_file_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    save_solid_image(tmp_path / "good.png", color="red")
    save_solid_image(tmp_path / "bad.png", color="blue")
    data = PairFile(write_pairs(tmp_path, {"prompt": "a red", "chosen": "good.png", "rejected": "bad.png"})).load(SEED)
    batch = data.batch(0, 2, 0, 1)
    assert batch.prompts == ("a red", "a red") and data.first_prompts(1).prompts == ("a red",)
    assert batch.chosen[0, 0, :, 0, 0].tolist() == [1, 0, 0] and batch.rejected[0, 0, :, 0, 0].tolist() == [0, 0, 1]


def test_invalid_pairs_are_refused_by_row(tmp_path: Path) -> None:
    save_solid_image(tmp_path / "good.png")
    save_solid_image(tmp_path / "large.png", (9, 8))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(ConfigError, match=r"pairs\.jsonl, line 1: 'rejected'.* prompt, chosen.*TM232"):
        PairFile(write_pairs(tmp_path, {"prompt": "a", "chosen": "good.png"})).load(SEED)
    with pytest.raises(ConfigError, match=r"pairs\.jsonl, line 1: the file .*none\.png.*TM234"):
        PairFile(write_pairs(tmp_path, {"prompt": "a", "chosen": "good.png", "rejected": "none.png"})).load(SEED)
    uneven = PairFile(write_pairs(tmp_path, {"prompt": "a", "chosen": "good.png", "rejected": "large.png"})).load(SEED)
    with pytest.raises(
        ConfigError, match=r"line 1: large\.png has 1 frames of 9x8 pixels, but .*line 1: good\.png has.*TM190"
    ):
        uneven.batch(0, 1, 0, 1)
    broken = PairFile(write_pairs(tmp_path, {"prompt": "a", "chosen": "good.png", "rejected": "broken.png"})).load(SEED)
    with pytest.raises(ImageError, match=r"broken\.png.*TM172"):
        broken.batch(0, 1, 0, 1)
