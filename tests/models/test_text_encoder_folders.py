"""Text encoders as users have them: spiece.model only, T5 at a folder's root, and CLIP's tokenizer of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_clip import build_clip, save_checkpoint, save_original_checkpoints
from transformers import AutoTokenizer, T5Config, T5EncoderModel

from tastemaker.config.load import load
from tastemaker.config.required_files import published_sources
from tastemaker.config.shared_tokenizers import share_clip_tokenizer
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.opensora.components import T5
from tastemaker.models.pipeline_components import PipelineComponents, load_tokenizer
from tastemaker.rewards.backbones.frozen_models import silence_transformers
from tastemaker.rewards.backbones.tokenizers import CLIP_TOKENIZER
from tastemaker.rewards.hps import HpsReward

PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁cat", -3.0), ("s", -2.5), ("▁a", -1.5)]
CONTROL, UNKNOWN, NORMAL = 3, 2, 1  # piece types of sentencepiece


def write_spiece(folder: Path, pieces: list[tuple[str, float]] = PIECES, model_type: int = 1) -> Path:
    """A sentencepiece file, written with its published schema."""
    from transformers.utils import sentencepiece_model_pb2_new as schema

    model: Any = schema.ModelProto()
    for piece, score in pieces:
        kind = {"<unk>": UNKNOWN, "<pad>": CONTROL, "</s>": CONTROL}.get(piece, NORMAL)
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = model_type
    folder.mkdir(exist_ok=True)
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    return folder


def test_spiece_model_alone_gives_the_tokenizer_of_t5(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_spiece(tmp_path / "tokenizer"))
    assert tokenizer("a cats dog").input_ids[:3] == [6, 4, 5] and tokenizer("").input_ids == [1]
    assert tokenizer.pad_token_id == 0 and tokenizer.convert_tokens_to_ids("<extra_id_99>") == len(PIECES)
    assert len(tokenizer) == len(PIECES) + 100
    tokenizer.save_pretrained(tmp_path / "converted")  # with a tokenizer.json, which transformers reads itself
    texts = ["a cat", "  cats  a ", "catscats\ta", "ä"]
    converted = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert [tokenizer(x).input_ids for x in texts] == [converted(x).input_ids for x in texts]


def test_other_sentencepiece_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"spiece\.model.*tokenizer\.json.*sentencepiece.*TM888"):
        load_tokenizer(write_spiece(tmp_path / "bpe", model_type=2))
    with pytest.raises(ConfigError, match=r"spiece\.model.*TM888"):
        load_tokenizer(write_spiece(tmp_path / "llama", [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]))
    (tmp_path / "bpe" / "spiece.model").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(ConfigError, match=r"readable sentencepiece.*TM887"):
        load_tokenizer(tmp_path / "bpe")


@torch.no_grad()
def test_t5_at_the_root_of_a_folder_is_read_like_one_of_a_pipeline(tmp_path: Path) -> None:
    config = T5Config(vocab_size=107, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    torch.manual_seed(0)
    net = T5EncoderModel(config).eval()
    root = write_spiece(tmp_path / "t5-v1_1-xxl")  # DeepFloyd's: everything at its root
    pipeline = tmp_path / "pixart"
    pipeline.mkdir()
    write_spiece(pipeline / "tokenizer")
    with silence_transformers():
        net.save_pretrained(root)
        net.save_pretrained(pipeline / "text_encoder")
    outputs, digests = [], []
    for folder in (root, pipeline):
        components = PipelineComponents(str(folder), T5, {}, Placement())
        encoder = components.load_text_encoder("text_encoder", T5EncoderModel, "tokenizer", 8)
        outputs.append(encoder(["a cats", ""], use_attention_mask=True).last_hidden_state)
        digests.append(components.text_encoder_digest("text_encoder"))
    assert outputs[0].equal(outputs[1]) and digests[0] == digests[1]
    (root / "model_index.json").write_text("{}")  # of a pipeline, whose encoders have folders of their own
    with pytest.raises(ConfigError, match=r"text_encoder.*TM501"):
        PipelineComponents(str(root), T5, {}, Placement()).load_encoder("text_encoder", T5EncoderModel)


@torch.no_grad()
def test_clip_tokenizer_of_a_pipeline_is_reused_for_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tastemaker.config.shared_tokenizers.find_cached", lambda _: None)
    net = build_clip()
    flux, hps = tmp_path / "flux", save_original_checkpoints(net, tmp_path / "hps_ckpt")[0]
    save_checkpoint(net, flux / "tokenizer")
    for file in flux.glob("tokenizer/*"):
        if not file.name.startswith(("tokenizer", "vocab", "merges", "special")):
            file.unlink()
    weights = [f"model.weights={flux}", f"rewards.hps.weights={Path(hps).parent}"]
    config = load("srpo-flux-hps", weights)
    spec: Any = share_clip_tokenizer(config).rewards["hps"].spec
    assert spec.tokenizer == str(flux / "tokenizer") and CLIP_TOKENIZER not in published_sources(config)
    pixels = torch.rand(2, 1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    scores = [
        HpsReward(weights=hps, tokenizer=str(folder)).load(Placement()).score(pixels, ["a", "b"], [{}, {}])
        for folder in (flux, flux / "tokenizer")  # the pipeline, or the folder in it
    ]
    assert scores[0].equal(scores[1])
    wrapped = load("srpo-flux-hps", [weights[0], "rewards.it={type: clipped, max: 30, reward: {type: pickscore}}"])
    inner: Any = share_clip_tokenizer(wrapped).rewards["it"].spec
    assert inner.reward.tokenizer == str(flux / "tokenizer")
    settings = json.loads((flux / "tokenizer/tokenizer_config.json").read_text())
    (flux / "tokenizer/tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "T5Tokenizer"}))
    assert share_clip_tokenizer(config) == config and CLIP_TOKENIZER in published_sources(config)


def test_clip_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(build_clip(), tmp_path / "clip")
    wide = build_clip()
    wide.text_model.embeddings.token_embedding = torch.nn.Embedding(600, 64)
    weights = save_original_checkpoints(wide, tmp_path / "files")[0]
    with pytest.raises(ConfigError, match=r"514 tokens.*600.*TM373"):
        HpsReward(weights=weights, tokenizer=folder).load(Placement())
