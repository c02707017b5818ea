"""Places in PaliGemma's answers, and the pictures they are drawn on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from tastemaker.core.registry import ConfigError
from tastemaker.data.image_io import read_image, save_image
from tastemaker.vlm.annotations import (
    COLORS,
    PaliGemmaDetection,
    PaliGemmaMaskDecoder,
    annotate_images,
    detections_as_json,
    draw_detections,
    load_mask_decoder,
    open_annotation_writer,
    parse_detections,
)

CODES = "".join(f"<seg{i:03d}>" for i in range(16))
BOX = "<loc0256><loc0512><loc0768><loc1023>"


def test_boxes_are_read_top_first_with_their_names() -> None:
    found = parse_detections(f"{BOX} cat ; <loc0000><loc0000><loc0512><loc0256> black dog")
    assert [place.label for place in found] == ["cat", "black dog"]
    assert found[0].box == (0.5, 0.25, 1023 / 1024, 0.75)
    assert found[1].corners(200, 100) == (0, 0, 50, 50)


def test_outlines_are_read_with_their_boxes() -> None:
    (place,) = parse_detections(f"{BOX} {CODES} cat")
    assert (place.label, place.codes) == ("cat", tuple(range(16)))


@pytest.mark.parametrize("answer", ["a cat on a mat", "", "<loc0001><loc0002><loc0003>", "<loc12><loc0001>"])
def test_other_answers_point_nowhere(answer: str) -> None:
    assert parse_detections(answer) == []


def test_crooked_answers_are_read_as_far_as_they_go() -> None:
    first, second = parse_detections(f"<loc0768><loc1023><loc0256><loc0512> cat {BOX}<seg001><seg002> dog")
    assert first.box == parse_detections(f"{BOX} cat")[0].box  # whichever corner came first
    assert (second.label, second.codes) == ("dog", ())  # too few codes for an outline
    assert parse_detections(BOX)[0].label == ""


def test_rows_say_what_was_found_in_pixels() -> None:
    assert detections_as_json(f"{BOX} cat", 80, 100) == [{"label": "cat", "box": [50, 20, 100, 60]}]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """As big_vision publishes them, with the half of the VQ-VAE that is not needed here."""
    torch.manual_seed(0)
    state = {key: x for key, x in PaliGemmaMaskDecoder().state_dict().items() if key != "embedding"}
    state = {key: torch.randn_like(x) / x[0].numel() ** 0.5 if x.ndim > 1 else x * 0 for key, x in state.items()}
    held = {**state, "_vq_vae._embedding": torch.randn(128, 512), "encoder.0.weight": torch.zeros(2)}
    np.savez(tmp_path / "vae-oid.npz", **{key: x.numpy() for key, x in held.items()})
    save_file(held, tmp_path / "vae.safetensors")
    return tmp_path / "vae-oid.npz"


def test_outlines_come_from_either_file(weights: Path) -> None:
    one, other = load_mask_decoder(weights), load_mask_decoder(weights.with_name("vae.safetensors"))
    codes = torch.arange(32).view(2, 16)
    shares = one(codes)
    assert shares.shape == (2, 64, 64) and 0 <= shares.min() < shares.max() <= 1
    assert torch.equal(shares, other(codes)) and not torch.equal(shares[0], shares[1])


def test_codes_lie_row_by_row_in_the_square() -> None:
    """The published decoder reads the sixteen codes as four rows of four."""
    net = PaliGemmaMaskDecoder()
    with torch.no_grad():
        net.embedding[1, 0] = 1.0
        for key, x in net.state_dict().items():
            x.zero_() if key != "embedding" else None
        net.get_submodule("decoder.0").weight[0, 0] = 1.0
        for place in (4, 6, 8, 10):
            net.get_submodule(f"decoder.{place}").weight[0, 0, 1:3, 1:3] = 1.0
        net.get_submodule("decoder.12").weight[0, 0] = 1.0
    codes = torch.zeros(1, 16, dtype=torch.long)
    codes[0, 6] = 1  # second row, third column
    found = (net(codes)[0] > 0.75).nonzero()
    assert found.min(0).values.tolist() == [16, 32] and found.max(0).values.tolist() == [31, 47]


def test_an_outline_covers_nothing_outside_its_box(weights: Path) -> None:
    place = PaliGemmaDetection("cat", (0.5, 0.25, 0.75, 1.0), tuple(range(16)))
    mask = load_mask_decoder(weights).mask(place, 40, 20)
    assert mask is not None and mask[5:, 20:30].any()
    mask[5:, 20:30] = 0
    assert not mask.any()
    assert (
        load_mask_decoder(weights)
        .mask(PaliGemmaDetection("cat", (0.5, 0.25, 0.5, 1.0), tuple(range(16))), 40, 20)
        .sum()
        == 0
    )
    assert load_mask_decoder(weights).mask(PaliGemmaDetection("cat", (0, 0, 1, 1)), 40, 20) is None


def test_boxes_are_drawn_where_they_are() -> None:
    shown = draw_detections(torch.ones(3, 100, 200), [PaliGemmaDetection("", (0.25, 0.5, 0.75, 0.9))], None)
    color = torch.tensor(COLORS[0]) / 255
    assert torch.allclose(shown[:, 50, 100], color, atol=0.01) and torch.equal(shown[:, 70, 100], torch.ones(3))
    named = draw_detections(torch.ones(3, 100, 200), [PaliGemmaDetection("cat", (0.25, 0.5, 0.75, 0.9))], None)
    assert not torch.equal(named, shown)


def heard(path: Path) -> tuple[Console, Path]:
    return Console(file=path.open("w"), width=400), path


def test_outlines_without_their_decoder_are_boxes_and_that_is_said(weights: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    save_image(torch.ones(1, 3, 64, 64), file)
    answer = [(file, f"<loc0000><loc0000><loc1023><loc1023> {CODES} cat")]
    for name, decoder in (("boxes", None), ("outlines", weights)):
        console, log = heard(tmp_path / f"{name}.txt")
        made = open_annotation_writer(tmp_path / f"{name}.png", decoder, folder=False)
        assert made is not None and annotate_images(made, answer, None, console) == 1
        console.file.close()
        assert ("drawn as boxes" in log.read_text()) == (decoder is None)
    plain, filled = (read_image(tmp_path / f"{name}.png")[0] for name in ("boxes", "outlines"))
    assert (plain[:, 20:60, 20:60] == 1).all() and (filled[:, 20:60, 20:60] < 1).any()


def test_pictures_of_a_folder_are_drawn_into_another_under_their_names(tmp_path: Path) -> None:
    files = [tmp_path / "in" / name for name in ("a.png", "a.jpg", "below/a.png")]
    for file in files:
        save_image(torch.ones(1, 3, 16, 16), file)
    console, _ = heard(tmp_path / "log.txt")
    made = open_annotation_writer(tmp_path / "out", None, folder=True)
    assert (
        made is not None
        and annotate_images(made, [(file, f"{BOX} cat") for file in files], tmp_path / "in", console) == 3
    )
    console.file.close()
    drawn = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.png")}
    assert drawn == {"a.png", "a.jpg.png", "below/a.png"}


def test_answers_that_point_nowhere_are_told_and_drawn_on_nothing(tmp_path: Path) -> None:
    save_image(torch.ones(1, 3, 8, 8), tmp_path / "a.png")
    console, log = heard(tmp_path / "log.txt")
    made = open_annotation_writer(tmp_path / "out", None, folder=True)
    assert made is not None and annotate_images(made, [(tmp_path / "a.png", "a cat")], tmp_path, console) == 0
    console.file.close()
    assert "nothing is drawn" in log.read_text() and not (tmp_path / "out").exists()


def test_mistakes_are_told_in_a_sentence(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draws nothing without --draw"):
        open_annotation_writer(None, weights, folder=False)
    with pytest.raises(ConfigError, match="is no image"):
        open_annotation_writer(tmp_path / "out.txt", None, folder=False)
    with pytest.raises(ConfigError, match="there is no file"):
        load_mask_decoder(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"no readable \.npz"):
        load_mask_decoder(tmp_path / "bad.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with pytest.raises(ConfigError, match="has no fitting"):
        load_mask_decoder(tmp_path / "other.npz")
    with pytest.raises(ConfigError, match="mask code 128"):
        load_mask_decoder(weights).mask(PaliGemmaDetection("cat", (0, 0, 1, 1), (128,) * 16), 8, 8)


def test_a_name_at_the_edge_stays_within_the_picture() -> None:
    corner = "<loc0900><loc0950><loc1023><loc1023> umbrella"
    shown = draw_detections(torch.zeros(3, 120, 160), parse_detections(corner), None)
    named = (shown.sum(0) > 0).nonzero()
    assert int(named[:, 1].min()) < 0.8 * 160 and int(named[:, 0].min()) < 115  # all of it, which is wider than its box
    letters = (shown.min(0).values > 0.9).nonzero()
    assert len(letters) > 20 and int(letters[:, 1].max()) < 160 - 2
