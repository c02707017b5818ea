"""GenEval's Mask2Former detector: preprocessing, network and post-processing match mmdet; checkpoint layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.mask2former import (
    DetectorPreprocessing,
    Mask2FormerNetwork,
    ResizedFrame,
    load_mask2former,
    load_mmdet,
    resize_bilinear,
    select_instances,
)
from tastemaker.rewards.backbones.mask2former_keys import convert_keys, mask2former_config, reorder_patch_merging

FIXTURES = Path(__file__).parent.parent / "fixtures/mask2former"
GOLDEN = load_file(FIXTURES / "tiny_golden.safetensors")
STATE = {key.removeprefix("state."): x for key, x in GOLDEN.items() if key.startswith("state.")}


def recorded_json(name: str) -> Any:
    with safe_open(FIXTURES / "tiny_golden.safetensors", "pt") as file:
        return json.loads(file.metadata()[name])


@pytest.fixture(scope="module")
def net() -> Mask2FormerNetwork:
    return load_mmdet(STATE, Path("tiny.pth"), Placement())


def test_bilinear_resize_matches_opencv_bit_for_bit() -> None:
    golden = load_file(FIXTURES / "cv2_linear_golden.safetensors")
    for case in range(3):
        before, after = (golden[f"{case}.{name}"].movedim(-1, 0).int() for name in ("input", "output"))
        assert torch.equal(resize_bilinear(before, (after.shape[1], after.shape[2])), after)


def test_images_are_padded_with_gray_to_multiples_of_32() -> None:
    inputs, frame = DetectorPreprocessing()(torch.ones(1, 3, 300, 200))
    assert frame == ResizedFrame((300, 200), (1200, 800), (1216, 800)) and inputs.shape == (1, 3, 1216, 800)
    assert inputs[0, 0, -1, 0].item() == pytest.approx((128 - 123.675) / 58.395)
    assert inputs[0, 0, 0, 0].item() == pytest.approx((255 - 123.675) / 58.395)
    assert DetectorPreprocessing()(torch.ones(1, 3, 512, 512))[1].resized == (800, 800)
    assert DetectorPreprocessing()(torch.ones(1, 3, 100, 1000))[1].resized == (133, 1333), (
        "the longer side is limited to 1333"
    )


@pytest.mark.parametrize("case", ["a", "b"])
def test_network_matches_mmdet(case: str, net: Mask2FormerNetwork) -> None:
    with torch.no_grad():
        classes, masks = net(GOLDEN[f"{case}.input.pixel_values"])
    torch.testing.assert_close(classes, GOLDEN[f"{case}.output.class_logits"], atol=1e-4, rtol=0)
    torch.testing.assert_close(masks, GOLDEN[f"{case}.output.mask_logits"], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("case", "row"), [("a", 0), ("a", 1), ("b", 0)])
def test_instances_match_mmdet(case: str, row: int) -> None:
    shapes, max_instances = recorded_json("cases")[f"{case}.meta"], recorded_json("max_per_image")
    padded = tuple(GOLDEN[f"{case}.input.pixel_values"].shape[-2:])
    frame = ResizedFrame(tuple(shapes["ori_shape"]), tuple(shapes["img_shape"]), (padded[0], padded[1]))
    classes, masks = (GOLDEN[f"{case}.output.{name}_logits"][row] for name in ("class", "mask"))
    instances = select_instances(classes, masks, frame, max_instances=max_instances)
    expected = {name: GOLDEN[f"{case}.post.{row}.{name}"] for name in ("bboxes", "labels", "masks")}
    # mmdet returns instances unordered, so both sets are sorted.
    order, expected_order = (
        _order(instances.label, instances.boxes, instances.score),
        _order(expected["labels"], *_split(expected["bboxes"])),
    )
    assert torch.equal(instances.label[order], expected["labels"][expected_order])
    assert torch.equal(instances.masks[order], expected["masks"][expected_order].bool())
    rows = torch.cat([instances.boxes, instances.score[:, None]], 1)[order], expected["bboxes"][expected_order]
    torch.testing.assert_close(*rows, atol=1e-5, rtol=0)


def _split(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return boxes[:, :4], boxes[:, 4]


def _order(label: Tensor, boxes: Tensor, score: Tensor) -> list[int]:
    columns = zip(label.tolist(), boxes.tolist(), score.tolist(), strict=True)
    keys = [(name, *box, round(confidence, 4)) for name, box, confidence in columns]
    return sorted(range(len(keys)), key=keys.__getitem__)


def test_threshold_drops_only_less_confident_instances() -> None:
    frame = ResizedFrame((45, 40), (90, 80), (96, 80))
    logits = GOLDEN["a.output.class_logits"][0], GOLDEN["a.output.mask_logits"][0]
    unfiltered, filtered = select_instances(*logits, frame), select_instances(*logits, frame, threshold=0.1)
    expected = unfiltered.score[unfiltered.score > 0.1].sort().values
    assert 0 < len(expected) < len(unfiltered.score)
    torch.testing.assert_close(filtered.score[filtered.score > 0.1].sort().values, expected)


def test_image_with_no_objects_gives_no_instances() -> None:
    classes = torch.zeros(5, 81)
    classes[:, -1] = 20
    instances = select_instances(classes, torch.zeros(5, 4, 4), ResizedFrame((9, 7), (16, 12), (32, 32)), threshold=0.3)
    assert len(instances.label) == 0 and instances.boxes.shape == (0, 4) and instances.masks.shape == (0, 9, 7)


def test_published_keys_and_sizes_are_converted() -> None:
    keymap = json.loads((FIXTURES / "keymap.json").read_text("utf-8"))
    shapes = json.loads((FIXTURES / "state_dict_keys_mmdet.json").read_text("utf-8"))
    state = {key: torch.empty(entry["shape"], device="meta") for key, entry in shapes.items()}
    targets = {target for entry in keymap["map"].values() for target in entry["to"] or ()}
    assert set(convert_keys(state, "it")) == targets and len(targets) == 757
    sizes = mask2former_config(state)
    for name, value in sizes.pop("backbone_config").items():
        assert value == keymap["config"]["backbone_config"][name], name
    for name, value in sizes.items():
        assert value == keymap["config"][name], name


def test_mmdet_3_key_names_are_read(net: Mask2FormerNetwork) -> None:
    renames = (
        (r"(transformer_decoder\.layers\.\d+)\.attentions\.0\.", r"\1.cross_attn."),
        (r"(transformer_decoder\.layers\.\d+)\.attentions\.1\.", r"\1.self_attn."),
        (r"(pixel_decoder\.encoder\.layers\.\d+)\.attentions\.0\.", r"\1.self_attn."),
        (r"(layers\.\d+)\.ffns\.0\.layers", r"\1.ffn.layers"),
    )
    newer = dict(STATE)
    for pattern, to in renames:
        newer = {re.sub(pattern, to, key): x for key, x in newer.items()}
    assert set(newer) != set(STATE)
    newer["data_preprocessor.mean"] = torch.zeros(3, 1, 1)
    loaded = load_mmdet(newer, Path("newer.pth"), Placement()).state_dict()
    assert all(torch.equal(x, loaded[key]) for key, x in net.state_dict().items())


def test_patch_merging_is_reordered_for_swin() -> None:
    """mmdet unfolds channel by channel, Swin takes corners (0, 0), (1, 0), (0, 1), (1, 1) with all channels each."""
    mmdet_order = torch.tensor([10 * c + corner for c in range(3) for corner in range(4)])  # corner = 2 row + column
    assert reorder_patch_merging(mmdet_order).tolist() == [10 * c + corner for corner in (0, 2, 1, 3) for c in range(3)]


def save_hub_layout(net: Any, path: Path) -> Path:
    path.mkdir()
    net.model.config.save_pretrained(path)
    save_file({key: x.contiguous() for key, x in net.state_dict().items()}, path / "model.safetensors")
    return path


def test_hub_directory_gives_the_same_outputs(tmp_path: Path) -> None:
    tiny, pixels = (
        load_mask2former("tiny", Placement()),
        torch.rand(2, 3, 50, 70, generator=torch.Generator().manual_seed(0)),
    )
    loaded = load_mask2former(str(save_hub_layout(tiny.net, tmp_path / "hub")), Placement())
    assert loaded.variant == "transformers: hub" and not any(p.requires_grad for p in loaded.net.parameters())
    with torch.no_grad():
        inputs = tiny.preprocessing(pixels)[0]
        for loaded_output, expected_output in zip(loaded.net(inputs), tiny.net(inputs), strict=True):
            assert torch.equal(loaded_output, expected_output)


def test_older_swin_key_names_are_read_and_loss_keys_ignored(tmp_path: Path) -> None:
    tiny = load_mask2former("tiny", Placement())
    directory = save_hub_layout(tiny.net, tmp_path / "hub")
    renames = (
        (r"encoder\.swin\.(encoder|embeddings)", r"encoder.\1"),
        (r"attention\.q_proj", "attention.self.query"),
        (r"(swin|encoder)(.*)attention\.k_proj", r"\1\2attention.self.key"),
    )
    state = load_file(directory / "model.safetensors")
    older = {}
    for key, x in state.items():
        if "pixel_level_module.encoder." in key:
            for pattern, to in renames:
                key = re.sub(pattern, to, key)
        older[key] = x
    older = {key: x for key, x in older.items() if "swin.layernorm" not in key} | {
        "criterion.empty_weight": torch.ones(81)
    }
    save_file(older, directory / "model.safetensors")
    loaded = load_mask2former(str(directory), Placement()).net.state_dict()
    assert all(torch.equal(x, loaded[key]) for key, x in state.items())


def test_mmdet_file_sets_the_variant_and_needs_80_coco_classes(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "meta": {"CLASSES": ("a",)}}, tmp_path / "five.pth")
    with pytest.raises(ConfigError, match=r"five\.pth.* 5 .*80.*TM361"):
        load_mask2former(str(tmp_path / "five.pth"), Placement())
    wide = dict(STATE)
    for end in ("weight", "bias"):
        original = STATE[f"panoptic_head.cls_embed.{end}"]
        wide[f"panoptic_head.cls_embed.{end}"] = torch.zeros(81, *original.shape[1:])
    torch.save({"state_dict": wide}, tmp_path / "all.pth")
    assert load_mask2former(str(tmp_path / "all.pth"), Placement()).variant == "mmdet: all.pth"


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"https://download.openmmlab.com/.*c9d0c4f2.*TM359"):
        load_mask2former("mmdet/mask2former-swin-s", Placement())
    unexpected = {**STATE, "roi_head.weight": torch.zeros(1)}
    torch.save({"state_dict": unexpected}, tmp_path / "unexpected.pth")
    with pytest.raises(ConfigError, match=r"'roi_head\.weight'.*TM363"):
        load_mask2former(str(tmp_path / "unexpected.pth"), Placement())
    (tmp_path / "config.json").write_text('{"model_type": "yolos"}', encoding="utf-8")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"yolos.*Mask2Former.*TM362"):
        load_mask2former(str(tmp_path), Placement())
