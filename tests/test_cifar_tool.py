"""All stages of tools/cifar.sh, and decoding and classification of its samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tastemaker.rewards.classifier import Cifar10Classifier

ROOT = Path(__file__).parent.parent
VQ_SETTINGS = " ".join(
    [
        "batch_size=4",
        "autoencoder.channels=16",
        "autoencoder.num_res_blocks=1",
        "discriminator.start_step=1",
        "discriminator.width=8",
        "sample.count=2",
        "validation.num_samples=4",
    ]
)
GENERATOR = "model.width=32 model.depth=1 model.heads=2 batch.prompts=2 sample.every=0"


@pytest.mark.long
def test_all_stages_of_cifar_sh_run_tiny(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 1024, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data / "data_batch_1.png")
    (data / "train_lables.json").write_text(json.dumps([i % 10 for i in range(24)]))
    torch.manual_seed(0)
    save_file(Cifar10Classifier().state_dict(), tmp_path / "classifier.safetensors")
    settings = {
        "TRAINED": "20",
        "STEPS": "2 2 1 1",
        "COUNT": "10",
        "BATCH_SIZE": "10",
        "DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    settings |= {"VQ_SETTINGS": VQ_SETTINGS, "SETTINGS": GENERATOR, "PYTHON": sys.executable}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "CIFAR_HOME": str(tmp_path)}
    script = [str(ROOT / "tools/cifar.sh"), str(data), str(tmp_path / "classifier.safetensors"), str(tmp_path / "out")]
    cpu = ["engine.device=cpu", "engine.precision=fp32"]
    process = subprocess.run([*script, *cpu], env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    with tarfile.open(tmp_path / "out/runs.tgz") as file:
        names = file.getnames()
        assert sum(name.startswith("tokens-") for name in names) == 6
        file.extract("tokens-grpo-1.5.npz", tmp_path, filter="data")
        lines = file.extractfile("./likelihood.jsonl")
        assert lines is not None and {*json.loads(lines.read())["nats per token"]} == {"training", "held_out"}
    command = [sys.executable, str(ROOT / "tools/cifar_samples.py"), "decode", "tokens-grpo-1.5.npz"]
    options = ["--classifier", str(tmp_path / "classifier.safetensors"), "--sheet", "sheet.png"]
    arguments = [str(tmp_path / "out/vq.safetensors"), "samples.npz", *options]
    process = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert 0 <= json.loads(process.stdout)["accuracy"] <= 1
    with np.load(tmp_path / "samples.npz") as samples:
        assert samples["arr_0"].shape == (10, 32, 32, 3)
