"""Prompt embeddings: cached, computed beforehand, stored in folders, and read without text encoders."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from tiny_pipelines import CLIP_TOKENS, T5_VOCAB_SIZE, byte_clip_tokenizer, byte_t5_tokenizer, random_network
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tastemaker.cli import main
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.data.embedding_store import (
    CAPTIONS,
    INDEX,
    ShardedEmbeddingStore,
    fill_embedding_store,
    fingerprint_file,
)
from tastemaker.data.prompts import PromptFile
from tastemaker.models.flux import TINY_CONFIGS, FluxSpec
from tastemaker.models.qwen_image import QwenImageSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec

PROMPTS = ["a red cat", "Two dogs, on a boat", "ein großer Hund", ""]
SPECS = [FluxSpec(), QwenImageSpec(), Sd3Spec(), Sd15Spec(), SdxlSpec()]
HERE = Placement()


def embed(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["embed", *arguments, "--tiny", "--device", "cpu", "--precision", "fp32"])
    return int(end.value.code or 0)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS[:3]), encoding="utf-8")
    return path


def written(spec: Any, folder: Path, prompts: list[str] = PROMPTS, size: int = 10**9) -> list[int]:
    texts = spec.load_prompt_encoder(HERE)
    return list(fill_embedding_store(ShardedEmbeddingStore(folder, texts.fingerprint), texts, prompts, size, 2))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_stored_embeddings_equal_the_text_encoders_output(spec: Any, tmp_path: Path) -> None:
    tiny = spec.tiny()
    assert written(tiny, tmp_path) == [4]
    output, read = (each.load(HERE).embed(PROMPTS[::-1]) for each in (tiny, replace(tiny, embeddings=tmp_path)))
    assert output.tensors.keys() == read.tensors.keys()
    for name, x in output.tensors.items():
        torch.testing.assert_close(read.tensors[name], x, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_text_encoders_are_loaded_only_for_missing_prompts(spec: Any, tmp_path: Path) -> None:
    written(spec.tiny(), tmp_path)
    texts = replace(spec.tiny(), embeddings=tmp_path).load_prompt_encoder(HERE)
    texts(PROMPTS[:2])
    assert texts._loaded is None
    assert texts(["another", PROMPTS[0]])["words"][1].equal(texts(PROMPTS[:1])["words"][0])
    assert texts._loaded is not None


def test_embeddings_have_the_dtype_of_the_run(tmp_path: Path) -> None:
    written(QwenImageSpec().tiny(), tmp_path)
    actual = replace(QwenImageSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(Placement(dtype=torch.bfloat16))(
        PROMPTS
    )
    assert actual["words"].dtype == torch.bfloat16 and actual["lengths"].dtype == torch.int64


def test_shards_are_bounded_and_finished_ones_are_kept(tmp_path: Path) -> None:
    spec = FluxSpec().tiny()
    row = sum(x.nbytes for x in spec.load_prompt_encoder(HERE)(["x"]).values())
    assert written(spec, tmp_path, size=2 * row) == [2, 2]
    files = sorted(tmp_path.glob("*.safetensors"))
    before = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 2 and all(file.stat().st_size < 2 * row + 1000 for file in files)
    assert written(spec, tmp_path) == []
    assert written(spec, tmp_path, [*PROMPTS, "a new one"]) == [1]
    assert [file.stat().st_mtime_ns for file in files] == before
    files[1].unlink()
    assert written(spec, tmp_path) == [2]


def test_interrupted_shard_is_ignored(tmp_path: Path) -> None:
    spec = FluxSpec().tiny()
    written(spec, tmp_path, PROMPTS[:2])
    (tmp_path / "embeddings-00001.safetensors").write_bytes(b"half of it")
    assert written(spec, tmp_path) == [2]
    assert len(ShardedEmbeddingStore(tmp_path, {}).take(PROMPTS)) == 4


@pytest.mark.parametrize(
    ("other", "what"),
    [({"seed": 1}, "text_encoder "), ({"max_text_tokens": 8}, r"words \(16, this model has 8\)")],
)
def test_embeddings_of_another_model_are_refused(other: dict[str, int], what: str, tmp_path: Path) -> None:
    written(FluxSpec().tiny(), tmp_path)
    with pytest.raises(ConfigError, match=f"were made with another {what}"):
        replace(FluxSpec().tiny(), embeddings=tmp_path, **other).load_prompt_encoder(HERE)
    with pytest.raises(ConfigError, match=r"another model \(flux, this model has sd15\)"):
        replace(Sd15Spec().tiny(), embeddings=tmp_path).load_prompt_encoder(HERE)


def test_file_fingerprint_samples_the_whole_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    content = bytearray(4 * 2**20)
    first.write_bytes(content)
    content[2**21 : 2**21 + 2**20] = b"x" * 2**20
    second.write_bytes(content)
    assert fingerprint_file(first) == fingerprint_file(first) != fingerprint_file(second)


def test_srpo_layout_round_trip(listed: Path, tmp_path: Path) -> None:
    out = tmp_path / "rl_embeddings"
    assert embed("flux", "--prompts", str(listed), "--out", str(out), "--layout", "srpo") == 0
    entries = json.loads((out / CAPTIONS[0]).read_text(encoding="utf-8"))
    assert [entry["caption"] for entry in entries] == PROMPTS[:3]
    assert entries[1].keys() == {"prompt_embed_path", "text_ids", "pooled_prompt_embeds_path", "caption"}
    actual = {
        folder: torch.load(out / folder / entries[1][key], weights_only=True)
        for folder, key in (
            ("prompt_embed", "prompt_embed_path"),
            ("pooled_prompt_embeds", "pooled_prompt_embeds_path"),
            ("text_ids", "text_ids"),
        )
    }
    output = FluxSpec().tiny().load_prompt_encoder(HERE)(PROMPTS[1:2])
    assert actual["prompt_embed"].equal(output["words"][0])
    assert actual["pooled_prompt_embeds"].equal(output["pooled"][0])
    assert actual["text_ids"].shape == (3,) and not actual["text_ids"].any()

    (out / CAPTIONS[0]).rename(out / CAPTIONS[1])  # which is what its training asks for
    for place in (out, out / CAPTIONS[1]):
        texts = replace(FluxSpec().tiny(), embeddings=place).load_prompt_encoder(HERE)
        assert texts(PROMPTS[:3])["words"][1].equal(output["words"][0])
        assert texts._loaded is None


def test_srpo_folder_is_read_without_running_code(listed: Path, tmp_path: Path) -> None:
    assert embed("flux", "--prompts", str(listed), "--out", str(tmp_path), "--layout", "srpo") == 0
    (tmp_path / "made_by.json").unlink()
    for name in ("prompt_embed", "pooled_prompt_embeds"):
        full = torch.load(tmp_path / name / "0.pt", weights_only=True)
        torch.save(full[None], tmp_path / name / "0.pt")
    texts = replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(HERE)
    assert texts(PROMPTS[:1])["words"].shape == (1, 16, 32)
    with pytest.raises(ConfigError, match=r"holds 16 tokens.* model\.max_text_tokens=16"):
        replace(FluxSpec().tiny(), embeddings=tmp_path, max_text_tokens=8).load_prompt_encoder(HERE)(PROMPTS[:1])
    (tmp_path / "prompt_embed" / "1.pt").write_bytes(pickle.dumps(print, 2))
    with pytest.raises(ConfigError, match=r"1\.pt"):
        texts(PROMPTS[1:2])


def test_embed_command_includes_negative_prompts_and_resumes(listed: Path, tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "out")
    assert embed("models/qwen-image", "--prompts", str(listed), "--out", out, "--limit", "2") == 0
    assert "4 prompts embedded, 4 in all" in capsys.readouterr().err
    assert embed("models/qwen-image", "--prompts", str(listed), "--out", out) == 0
    assert "1 prompts embedded, 5 in all" in capsys.readouterr().err
    index = json.loads((tmp_path / "out" / INDEX).read_text(encoding="utf-8"))
    assert index["shards"]["embeddings-00000.safetensors"] == [*PROMPTS[:2], "", " "]
    assert index["negatives"] == ["", " "]


@pytest.mark.slow
def test_ranks_share_the_prompts(listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert embed("flux", "--prompts", str(listed), "--out", str(out)) == 0
    assert "2 prompts embedded, and as many on each of 2 ranks" in capsys.readouterr().err
    names = {file.name for file in out.iterdir()}
    assert names == {INDEX, "embeddings-of-1.json", "embeddings-00000.safetensors", "embeddings-1-00000.safetensors"}
    texts = replace(FluxSpec().tiny(), embeddings=out).load_prompt_encoder(HERE)
    torch.testing.assert_close(texts(PROMPTS), FluxSpec().tiny().load_prompt_encoder(HERE)(PROMPTS), atol=1e-6, rtol=0)
    assert texts._loaded is None
    assert set(PromptFile(out / INDEX).load(0).prompts) == set(PROMPTS[:3])
    assert embed("flux", "--prompts", str(listed), "--out", str(out), "--layout", "srpo") == 2
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert embed("flux", "--prompts", str(listed), "--out", str(out)) == 0
    assert "0 prompts embedded, 4 in all" in capsys.readouterr().err


@pytest.mark.slow
def test_embed_command_reads_training_and_sample_prompts_of_a_recipe(tmp_path: Path, capsys: Any) -> None:
    looks = "sample.prompts=[a lighthouse on a cliff under storm clouds, a dog]"  # the first is among its data
    assert embed("srpo-flux-hps", looks, "--out", str(tmp_path)) == 0
    assert "18 prompts embedded" in capsys.readouterr().err
    assert len(PromptFile(tmp_path / INDEX).load(0)) == 16


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["models/flux"], "--prompts: the recipe names none"),
        (["grpo-toy-flow"], "model: toy_flow has no text encoder that could be left out"),
        (["srpo-flux-hps", "--layout", "fish"], "--layout: found 'fish'; expected tastemaker or srpo"),
        (["flowgrpo-sd35", "--layout", "srpo"], "is of embeddings of FLUX"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], sentence: str, tmp_path: Path, capsys: Any) -> None:
    assert embed(*arguments, "--out", str(tmp_path)) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_folder_without_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no embeddings in .*; expected embeddings.json or videos2caption.json"):
        replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(HERE)
    for text in ("[1]", "{", '[{"caption": "x"}]', "[]"):
        (tmp_path / CAPTIONS[0]).write_text(text)
        with pytest.raises(ConfigError, match=r"no list of captions|cannot be read as JSON|lists no prompts"):
            PromptFile(tmp_path / CAPTIONS[0]).load(0)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match="is no index of embeddings"):
        replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(HERE)


def test_plain_prompt_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "anime.json").write_text('["a cat", "a dog, 4k"]')  # as HPDv2 has its four styles
    assert PromptFile(tmp_path / "anime.json").load(0).prompts == ("a cat", "a dog, 4k")


def test_prompt_without_embedding_or_encoder_is_refused(tmp_path: Path) -> None:
    written(FluxSpec().tiny(), tmp_path)
    texts = replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(HERE)

    def nothing() -> Any:
        raise ConfigError("text_encoder cannot be read")

    texts._load = nothing
    with pytest.raises(ConfigError, match=r"'a wolf' is not among the 4 in .*; add it with `tastemaker embed`"):
        texts(["a wolf"])


def test_embedding_folders_are_prompt_datasets(listed: Path, tmp_path: Path) -> None:
    for layout in ("tastemaker", "srpo"):
        assert embed("flux", "--prompts", str(listed), "--out", str(tmp_path / layout), "--layout", layout) == 0
    for path in (tmp_path / "tastemaker" / INDEX, tmp_path / "srpo" / CAPTIONS[0]):
        rows = PromptFile(path).load(0)
        assert rows.first_prompts(3).prompts == tuple(PROMPTS[:3]) and len(rows) == 3


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A small FLUX in diffusers' layout."""
    place = tmp_path / "flux"
    random_network(FluxTransformer2DModel, TINY_CONFIGS["transformer"]).save_pretrained(place / "transformer")
    random_network(AutoencoderKL, TINY_CONFIGS["vae"]).save_pretrained(place / "vae")
    random_network(CLIPTextModel, CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS})).save_pretrained(
        place / "text_encoder"
    )
    t5 = T5Config(**{**TINY_CONFIGS["text_encoder_2"], "vocab_size": T5_VOCAB_SIZE})
    random_network(T5EncoderModel, t5).save_pretrained(place / "text_encoder_2")
    byte_clip_tokenizer().save_pretrained(place / "tokenizer")
    byte_t5_tokenizer().save_pretrained(place / "tokenizer_2")
    return place


@pytest.mark.slow
def test_training_needs_no_text_encoder_with_stored_embeddings(published: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    spec = FluxSpec(str(published), height=32, width=32, max_text_tokens=16)
    written(spec, shelf)
    output = spec.load(HERE).embed(PROMPTS).tensors
    for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.rmtree(published / part)
    model = replace(spec, embeddings=shelf).load(HERE)
    torch.testing.assert_close(model.embed(PROMPTS).tensors, output, atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match=r"'a wolf' is not among the 4 in .*text_encoder cannot be read"):
        model.embed(["a wolf"])


@pytest.mark.slow
def test_fingerprint_depends_on_weights_and_not_on_the_path(published: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    spec = FluxSpec(str(published), height=32, width=32, max_text_tokens=16, embeddings=shelf)
    written(replace(spec, embeddings=None), shelf)
    moved = published.rename(tmp_path / "moved")
    assert len(replace(spec, weights=str(moved)).load_prompt_encoder(HERE)(PROMPTS)["words"]) == 4
    net = CLIPTextModel.from_pretrained(moved / "text_encoder")
    net.get_input_embeddings().weight.data.add_(1e-3)
    net.save_pretrained(moved / "text_encoder")
    with pytest.raises(ConfigError, match="were made with another text_encoder "):
        replace(spec, weights=str(moved)).load_prompt_encoder(HERE)
