"""Detections in PaliGemma's answers: parsing, mask decoding, and drawing on images."""

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


def test_boxes_are_parsed_with_their_labels() -> None:
    detections = parse_detections(f"{BOX} cat ; <loc0000><loc0000><loc0512><loc0256> black dog")
    assert [detection.label for detection in detections] == ["cat", "black dog"]
    assert detections[0].box == (0.5, 0.25, 1023 / 1024, 0.75)
    assert detections[1].corners(200, 100) == (0, 0, 50, 50)


def test_mask_codes_are_parsed_with_their_boxes() -> None:
    (detection,) = parse_detections(f"{BOX} {CODES} cat")
    assert (detection.label, detection.codes) == ("cat", tuple(range(16)))


@pytest.mark.parametrize("answer", ["a cat on a mat", "", "<loc0001><loc0002><loc0003>", "<loc12><loc0001>"])
def test_answers_with_no_detection_parse_to_nothing(answer: str) -> None:
    assert parse_detections(answer) == []


def test_malformed_detections_are_parsed_partially() -> None:
    first, second = parse_detections(f"<loc0768><loc1023><loc0256><loc0512> cat {BOX}<seg001><seg002> dog")
    assert first.box == parse_detections(f"{BOX} cat")[0].box  # in either order of the corners
    assert (second.label, second.codes) == ("dog", ())  # too few codes for a mask
    assert parse_detections(BOX)[0].label == ""


def test_json_detections_are_in_pixels() -> None:
    assert detections_as_json(f"{BOX} cat", 80, 100) == [{"label": "cat", "box": [50, 20, 100, 60]}]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of random VQ-VAE weights in big_vision's layout, with the encoder that the decoder ignores."""
    torch.manual_seed(0)
    state = {key: x for key, x in PaliGemmaMaskDecoder().state_dict().items() if key != "embedding"}
    state = {key: torch.randn_like(x) / x[0].numel() ** 0.5 if x.ndim > 1 else x * 0 for key, x in state.items()}
    tensors = {**state, "_vq_vae._embedding": torch.randn(128, 512), "encoder.0.weight": torch.zeros(2)}
    np.savez(tmp_path / "vae-oid.npz", **{key: x.numpy() for key, x in tensors.items()})
    save_file(tensors, tmp_path / "vae.safetensors")
    return tmp_path / "vae-oid.npz"


def test_mask_decoder_is_read_from_npz_and_safetensors(weights: Path) -> None:
    from_npz, from_safetensors = load_mask_decoder(weights), load_mask_decoder(weights.with_name("vae.safetensors"))
    codes = torch.arange(32).view(2, 16)
    masks = from_npz(codes)
    assert masks.shape == (2, 64, 64) and 0 <= masks.min() < masks.max() <= 1
    assert torch.equal(masks, from_safetensors(codes)) and not torch.equal(masks[0], masks[1])


def test_mask_codes_are_in_row_major_order() -> None:
    """The published decoder reads the sixteen codes as four rows of four."""
    net = PaliGemmaMaskDecoder()
    with torch.no_grad():
        net.embedding[1, 0] = 1.0
        for key, x in net.state_dict().items():
            x.zero_() if key != "embedding" else None
        net.get_submodule("decoder.0").weight[0, 0] = 1.0
        for layer in (4, 6, 8, 10):
            net.get_submodule(f"decoder.{layer}").weight[0, 0, 1:3, 1:3] = 1.0
        net.get_submodule("decoder.12").weight[0, 0] = 1.0
    codes = torch.zeros(1, 16, dtype=torch.long)
    codes[0, 6] = 1  # second row, third column
    pixels = (net(codes)[0] > 0.75).nonzero()
    assert pixels.min(0).values.tolist() == [16, 32] and pixels.max(0).values.tolist() == [31, 47]


def test_mask_is_empty_outside_its_box(weights: Path) -> None:
    detection = PaliGemmaDetection("cat", (0.5, 0.25, 0.75, 1.0), tuple(range(16)))
    mask = load_mask_decoder(weights).mask(detection, 40, 20)
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


def test_boxes_are_drawn_at_their_coordinates() -> None:
    drawn = draw_detections(torch.ones(3, 100, 200), [PaliGemmaDetection("", (0.25, 0.5, 0.75, 0.9))], None)
    color = torch.tensor(COLORS[0]) / 255
    assert torch.allclose(drawn[:, 50, 100], color, atol=0.01) and torch.equal(drawn[:, 70, 100], torch.ones(3))
    labeled = draw_detections(torch.ones(3, 100, 200), [PaliGemmaDetection("cat", (0.25, 0.5, 0.75, 0.9))], None)
    assert not torch.equal(labeled, drawn)


def open_log(path: Path) -> tuple[Console, Path]:
    return Console(file=path.open("w"), width=400), path


def test_masks_are_drawn_as_boxes_when_the_decoder_is_missing(weights: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    save_image(torch.ones(1, 3, 64, 64), file)
    answer = [(file, f"<loc0000><loc0000><loc1023><loc1023> {CODES} cat")]
    for name, decoder in (("boxes", None), ("masks", weights)):
        console, log = open_log(tmp_path / f"{name}.txt")
        writer = open_annotation_writer(tmp_path / f"{name}.png", decoder, folder=False)
        assert writer is not None and annotate_images(writer, answer, None, console) == 1
        console.file.close()
        assert ("drawn as boxes" in log.read_text()) == (decoder is None)
    boxes, masks = (read_image(tmp_path / f"{name}.png")[0] for name in ("boxes", "masks"))
    assert (boxes[:, 20:60, 20:60] == 1).all() and (masks[:, 20:60, 20:60] < 1).any()


def test_annotated_images_of_a_directory_keep_their_names(tmp_path: Path) -> None:
    files = [tmp_path / "in" / name for name in ("a.png", "a.jpg", "below/a.png")]
    for file in files:
        save_image(torch.ones(1, 3, 16, 16), file)
    console, _ = open_log(tmp_path / "log.txt")
    writer = open_annotation_writer(tmp_path / "out", None, folder=True)
    assert (
        writer is not None
        and annotate_images(writer, [(file, f"{BOX} cat") for file in files], tmp_path / "in", console) == 3
    )
    console.file.close()
    drawn = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.png")}
    assert drawn == {"a.png", "a.jpg.png", "below/a.png"}


def test_answers_with_no_detection_are_reported_and_not_drawn(tmp_path: Path) -> None:
    save_image(torch.ones(1, 3, 8, 8), tmp_path / "a.png")
    console, log = open_log(tmp_path / "log.txt")
    writer = open_annotation_writer(tmp_path / "out", None, folder=True)
    assert writer is not None and annotate_images(writer, [(tmp_path / "a.png", "a cat")], tmp_path, console) == 0
    console.file.close()
    assert "nothing is drawn" in log.read_text() and not (tmp_path / "out").exists()


def test_invalid_options_and_decoder_files_are_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draw.*TM700"):
        open_annotation_writer(None, weights, folder=False)
    with pytest.raises(ConfigError, match=r"out\.txt.*TM701"):
        open_annotation_writer(tmp_path / "out.txt", None, folder=False)
    with pytest.raises(ConfigError, match=r"none\.npz.*TM698"):
        load_mask_decoder(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"bad\.npz.*TM699"):
        load_mask_decoder(tmp_path / "bad.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with pytest.raises(ConfigError, match=r"other\.npz.*TM697"):
        load_mask_decoder(tmp_path / "other.npz")
    with pytest.raises(ConfigError, match=r"mask code 128.*TM696"):
        load_mask_decoder(weights).mask(PaliGemmaDetection("cat", (0, 0, 1, 1), (128,) * 16), 8, 8)


def test_label_at_the_edge_stays_inside_the_image() -> None:
    corner = "<loc0900><loc0950><loc1023><loc1023> umbrella"
    drawn = draw_detections(torch.zeros(3, 120, 160), parse_detections(corner), None)
    colored = (drawn.sum(0) > 0).nonzero()
    assert int(colored[:, 1].min()) < 0.8 * 160 and int(colored[:, 0].min()) < 115  # the label is wider than its box
    letters = (drawn.min(0).values > 0.9).nonzero()
    assert len(letters) > 20 and int(letters[:, 1].max()) < 160 - 2
