"""Prompt embeddings: computed in advance, stored in folders, and read without text encoders."""

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
from tastemaker.models.flux2 import Flux2Spec
from tastemaker.models.hunyuanvideo15 import HunyuanVideo15Spec
from tastemaker.models.ltx2 import Ltx2Spec
from tastemaker.models.qwen_image import QwenImageSpec
from tastemaker.models.qwen_image_21 import QwenImage21Spec
from tastemaker.models.sana import SanaSpec
from tastemaker.models.sd3 import Sd3Spec
from tastemaker.models.sd15 import Sd15Spec
from tastemaker.models.sdxl import SdxlSpec
from tastemaker.models.wan_i2v import WanI2VSpec
from tastemaker.models.z_image import ZImageSpec

PROMPTS = ["a red cat", "Two dogs, on a boat", "ein großer Hund", ""]
SPECS = [
    *(FluxSpec(), Flux2Spec(), HunyuanVideo15Spec(), Ltx2Spec(), QwenImageSpec(), QwenImage21Spec(), SanaSpec()),
    *(Sd3Spec(), Sd15Spec(), SdxlSpec(), WanI2VSpec(), ZImageSpec()),
]
CPU = Placement()


def run_embed(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["embed", *arguments, "--tiny", "--device", "cpu", "--precision", "fp32"])
    return int(end.value.code or 0)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS[:3]), encoding="utf-8")
    return path


def store_embeddings(spec: Any, folder: Path, prompts: list[str] = PROMPTS, size: int = 10**9) -> list[int]:
    encoder = spec.load_prompt_encoder(CPU)
    return list(fill_embedding_store(ShardedEmbeddingStore(folder, encoder.fingerprint), encoder, prompts, size, 2))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_stored_embeddings_equal_the_text_encoders_output(spec: Any, tmp_path: Path) -> None:
    tiny = spec.tiny()
    assert store_embeddings(tiny, tmp_path) == [4]
    metadata = [{"image": torch.zeros(1, 3, 32, 32)}] * 4 if tiny.needs_initial_image else []
    encoded, stored = (s.load(CPU).embed(PROMPTS[::-1], metadata) for s in (tiny, replace(tiny, embeddings=tmp_path)))
    assert encoded.tensors.keys() == stored.tensors.keys()
    for name, x in encoded.tensors.items():
        torch.testing.assert_close(stored.tensors[name], x, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_text_encoders_are_loaded_only_for_missing_prompts(spec: Any, tmp_path: Path) -> None:
    store_embeddings(spec.tiny(), tmp_path)
    encoder = replace(spec.tiny(), embeddings=tmp_path).load_prompt_encoder(CPU)
    encoder(PROMPTS[:2])
    assert encoder._loaded is None
    assert encoder(["another", PROMPTS[0]])["prompt_embeds"][1].equal(encoder(PROMPTS[:1])["prompt_embeds"][0])
    assert encoder._loaded is not None


def test_embeddings_have_the_dtype_of_the_run(tmp_path: Path) -> None:
    store_embeddings(QwenImageSpec().tiny(), tmp_path)
    actual = replace(QwenImageSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(Placement(dtype=torch.bfloat16))(
        PROMPTS
    )
    assert actual["prompt_embeds"].dtype == torch.bfloat16 and actual["lengths"].dtype == torch.int64


def test_shards_are_bounded_and_finished_ones_are_kept(tmp_path: Path) -> None:
    spec = FluxSpec().tiny()
    row = sum(x.nbytes for x in spec.load_prompt_encoder(CPU)(["x"]).values())
    assert store_embeddings(spec, tmp_path, size=2 * row) == [2, 2]
    files = sorted(tmp_path.glob("*.safetensors"))
    before = [file.stat().st_mtime_ns for file in files]
    assert len(files) == 2 and all(file.stat().st_size < 2 * row + 1000 for file in files)
    assert store_embeddings(spec, tmp_path) == []
    assert store_embeddings(spec, tmp_path, [*PROMPTS, "a new one"]) == [1]
    assert [file.stat().st_mtime_ns for file in files] == before
    files[1].unlink()
    assert store_embeddings(spec, tmp_path) == [2]


def test_interrupted_shard_is_ignored(tmp_path: Path) -> None:
    spec = FluxSpec().tiny()
    store_embeddings(spec, tmp_path, PROMPTS[:2])
    (tmp_path / "embeddings-00001.safetensors").write_bytes(b"half of it")
    assert store_embeddings(spec, tmp_path) == [2]
    assert len(ShardedEmbeddingStore(tmp_path, {}).take(PROMPTS)) == 4


@pytest.mark.parametrize(
    ("changes", "difference"),
    [({"seed": 1}, "text_encoder "), ({"max_text_tokens": 8}, r"max_text_tokens \(16, .* 8\)")],
)
def test_embeddings_of_another_model_are_refused(changes: dict[str, int], difference: str, tmp_path: Path) -> None:
    store_embeddings(FluxSpec().tiny(), tmp_path)
    with pytest.raises(ConfigError, match=f"another {difference}"):
        replace(FluxSpec().tiny(), embeddings=tmp_path, **changes).load_prompt_encoder(CPU)
    with pytest.raises(ConfigError, match=r"another model \(flux, .* sd15\).*TM141"):
        replace(Sd15Spec().tiny(), embeddings=tmp_path).load_prompt_encoder(CPU)


def test_file_fingerprint_samples_the_whole_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    content = bytearray(4 * 2**20)
    first.write_bytes(content)
    content[2**21 : 2**21 + 2**20] = b"x" * 2**20
    second.write_bytes(content)
    assert fingerprint_file(first) == fingerprint_file(first) != fingerprint_file(second)


def test_srpo_layout_round_trip(prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rl_embeddings"
    assert run_embed("flux", "--prompts", str(prompt_file), "--out", str(out), "--format", "srpo") == 0
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
    output = FluxSpec().tiny().load_prompt_encoder(CPU)(PROMPTS[1:2])
    assert actual["prompt_embed"].equal(output["prompt_embeds"][0])
    assert actual["pooled_prompt_embeds"].equal(output["pooled_prompt_embeds"][0])
    assert actual["text_ids"].shape == (3,) and not actual["text_ids"].any()

    (out / CAPTIONS[0]).rename(out / CAPTIONS[1])  # the name that SRPO's training reads
    for path in (out, out / CAPTIONS[1]):
        encoder = replace(FluxSpec().tiny(), embeddings=path).load_prompt_encoder(CPU)
        assert encoder(PROMPTS[:3])["prompt_embeds"][1].equal(output["prompt_embeds"][0])
        assert encoder._loaded is None


def test_srpo_folder_is_read_without_running_code(prompt_file: Path, tmp_path: Path) -> None:
    assert run_embed("flux", "--prompts", str(prompt_file), "--out", str(tmp_path), "--format", "srpo") == 0
    (tmp_path / "made_by.json").unlink()
    for name in ("prompt_embed", "pooled_prompt_embeds"):
        embedding = torch.load(tmp_path / name / "0.pt", weights_only=True)
        torch.save(embedding[None], tmp_path / name / "0.pt")
    encoder = replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(CPU)
    assert encoder(PROMPTS[:1])["prompt_embeds"].shape == (1, 16, 32)
    with pytest.raises(ConfigError, match=r"model\.max_text_tokens=16.*TM146"):
        replace(FluxSpec().tiny(), embeddings=tmp_path, max_text_tokens=8).load_prompt_encoder(CPU)(PROMPTS[:1])
    (tmp_path / "prompt_embed" / "1.pt").write_bytes(pickle.dumps(print, 2))
    with pytest.raises(ConfigError, match=r"1\.pt.*TM519"):
        encoder(PROMPTS[1:2])


def test_embed_command_includes_negative_prompts_and_resumes(prompt_file: Path, tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "out")
    assert run_embed("models/qwen-image", "--prompts", str(prompt_file), "--out", out, "--limit", "2") == 0
    assert "4 prompts embedded, 4 in all" in capsys.readouterr().err
    assert run_embed("models/qwen-image", "--prompts", str(prompt_file), "--out", out) == 0
    assert "1 prompts embedded, 5 in all" in capsys.readouterr().err
    index = json.loads((tmp_path / "out" / INDEX).read_text(encoding="utf-8"))
    assert index["shards"]["embeddings-00000.safetensors"] == [*PROMPTS[:2], "", " "]
    assert index["negatives"] == ["", " "]


@pytest.mark.slow
def test_ranks_share_the_prompts(
    prompt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run_embed("flux", "--prompts", str(prompt_file), "--out", str(out)) == 0
    assert "2 prompts embedded, and as many on each of 2 ranks" in capsys.readouterr().err
    names = {file.name for file in out.iterdir()}
    assert names == {INDEX, "embeddings-of-1.json", "embeddings-00000.safetensors", "embeddings-1-00000.safetensors"}
    encoder = replace(FluxSpec().tiny(), embeddings=out).load_prompt_encoder(CPU)
    torch.testing.assert_close(encoder(PROMPTS), FluxSpec().tiny().load_prompt_encoder(CPU)(PROMPTS), atol=1e-6, rtol=0)
    assert encoder._loaded is None
    assert set(PromptFile(out / INDEX).load(0).prompts) == set(PROMPTS[:3])
    assert run_embed("flux", "--prompts", str(prompt_file), "--out", str(out), "--format", "srpo") == 2
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert run_embed("flux", "--prompts", str(prompt_file), "--out", str(out)) == 0
    assert "0 prompts embedded, 4 in all" in capsys.readouterr().err


@pytest.mark.slow
def test_embed_command_reads_training_and_sample_prompts_of_a_recipe(tmp_path: Path, capsys: Any) -> None:
    override = (
        "sample.prompts=[a lighthouse on a cliff under storm clouds, a dog]"  # the first is in its training data too
    )
    assert run_embed("srpo-flux-hps", override, "--out", str(tmp_path)) == 0
    assert "18 prompts embedded" in capsys.readouterr().err
    assert len(PromptFile(tmp_path / INDEX).load(0)) == 16


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["models/flux"], "--prompts: "),
        (["grpo-toy-flow"], "model toy_flow cannot use precomputed embeddings"),
        (["srpo-flux-hps", "--format", "fish"], "got 'fish'"),
        (["flowgrpo-sd35", "--format", "srpo"], "embeddings for FLUX"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], fragment: str, tmp_path: Path, capsys: Any) -> None:
    assert run_embed(*arguments, "--out", str(tmp_path)) == 2
    assert fragment in " ".join(capsys.readouterr().err.split())


def test_folder_without_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embeddings\.json.*TM148"):
        replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(CPU)
    for text in ("[1]", "{", '[{"caption": "x"}]', "[]"):
        (tmp_path / CAPTIONS[0]).write_text(text)
        with pytest.raises(ConfigError, match=r"TM147|TM142|TM149"):
            PromptFile(tmp_path / CAPTIONS[0]).load(0)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match=r"TM143"):
        replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(CPU)


def test_plain_prompt_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "anime.json").write_text('["a cat", "a dog, 4k"]')  # the format of HPDv2's four styles
    assert PromptFile(tmp_path / "anime.json").load(0).prompts == ("a cat", "a dog, 4k")


def test_prompt_without_embedding_or_encoder_is_refused(tmp_path: Path) -> None:
    store_embeddings(FluxSpec().tiny(), tmp_path)
    encoder = replace(FluxSpec().tiny(), embeddings=tmp_path).load_prompt_encoder(CPU)

    def refuse() -> Any:
        raise ConfigError("text_encoder cannot be read")

    encoder._load = refuse
    with pytest.raises(ConfigError, match=r"'a wolf'.*`tastemaker embed`.*TM537"):
        encoder(["a wolf"])


def test_embedding_folders_are_prompt_datasets(prompt_file: Path, tmp_path: Path) -> None:
    for layout in ("tastemaker", "srpo"):
        assert (
            run_embed("flux", "--prompts", str(prompt_file), "--out", str(tmp_path / layout), "--format", layout) == 0
        )
    for path in (tmp_path / "tastemaker" / INDEX, tmp_path / "srpo" / CAPTIONS[0]):
        dataset = PromptFile(path).load(0)
        assert dataset.first_prompts(3).prompts == tuple(PROMPTS[:3]) and len(dataset) == 3


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A small FLUX in diffusers' layout."""
    folder = tmp_path / "flux"
    random_network(FluxTransformer2DModel, TINY_CONFIGS["transformer"]).save_pretrained(folder / "transformer")
    random_network(AutoencoderKL, TINY_CONFIGS["vae"]).save_pretrained(folder / "vae")
    random_network(CLIPTextModel, CLIPTextConfig(**{**TINY_CONFIGS["text_encoder"], **CLIP_TOKENS})).save_pretrained(
        folder / "text_encoder"
    )
    t5 = T5Config(**{**TINY_CONFIGS["text_encoder_2"], "vocab_size": T5_VOCAB_SIZE})
    random_network(T5EncoderModel, t5).save_pretrained(folder / "text_encoder_2")
    byte_clip_tokenizer().save_pretrained(folder / "tokenizer")
    byte_t5_tokenizer().save_pretrained(folder / "tokenizer_2")
    return folder


@pytest.mark.slow
def test_training_needs_no_text_encoder_with_stored_embeddings(published: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    spec = FluxSpec(str(published), height=32, width=32, max_text_tokens=16)
    store_embeddings(spec, store)
    output = spec.load(CPU).embed(PROMPTS).tensors
    for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.rmtree(published / part)
    model = replace(spec, embeddings=store).load(CPU)
    torch.testing.assert_close(model.embed(PROMPTS).tensors, output, atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match=r"'a wolf'.*text_encoder.*TM501"):
        model.embed(["a wolf"])


@pytest.mark.slow
def test_fingerprint_depends_on_weights_and_not_on_the_path(published: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    spec = FluxSpec(str(published), height=32, width=32, max_text_tokens=16, embeddings=store)
    store_embeddings(replace(spec, embeddings=None), store)
    moved = published.rename(tmp_path / "moved")
    assert len(replace(spec, weights=str(moved)).load_prompt_encoder(CPU)(PROMPTS)["prompt_embeds"]) == 4
    net = CLIPTextModel.from_pretrained(moved / "text_encoder")
    net.get_input_embeddings().weight.data.add_(1e-3)
    net.save_pretrained(moved / "text_encoder")
    with pytest.raises(ConfigError, match=r"another text_encoder .*TM141"):
        replace(spec, weights=str(moved)).load_prompt_encoder(CPU)
