"""Small random chat models loaded from Hub and LLaVA-NeXT checkpoint layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from vlm_stubs import FAMILIES

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.rewards.backbones.frozen_models import load_network, silence_transformers
from tastemaker.rewards.vlm import VlmReward
from tastemaker.vlm.chat_model import ChatModel, load_chat_model, tiny_chat, tiny_tokenizer
from tastemaker.vlm.chat_processors import OneVisionProcessor
from tastemaker.vlm.llava_keys import convert_keys
from tastemaker.vlm.yes_no import CLARITY, POTENTIAL, QUESTIONS

# PaliGemma's processor calls a deprecated numpy interface.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

FIXTURES = Path(__file__).parents[1] / "fixtures"
IMAGES = torch.rand(4, 3, 40, 56, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a cat", "two dogs on a long bench", "", "a red car"]


def ask_clarity(judge: ChatModel, rows: list[int], keep_cache: bool, *more: str) -> Tensor:
    turns = [(CLARITY.replace("{prompt}", PROMPTS[i]), *more) for i in rows]
    return judge.ask(IMAGES[rows], turns, keep_cache).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_logits_match_single_logits(family: str, folders: dict[str, Path]) -> None:
    judge = load_chat_model(str(folders[family]), Placement())
    batched = ask_clarity(judge, [0, 1, 2, 3], False)
    single = torch.cat([ask_clarity(judge, [i], False) for i in range(4)])
    torch.testing.assert_close(batched, single, atol=2e-4, rtol=1e-4)
    assert (batched[0] - batched[1]).abs().max() > 0.1  # prompts and images change the logits


@pytest.mark.parametrize("family", FAMILIES)
def test_followup_with_cache_matches_full_conversation(family: str, folders: dict[str, Path]) -> None:
    judge = load_chat_model(str(folders[family]), Placement())
    turns = [(CLARITY.replace("{prompt}", prompt),) for prompt in PROMPTS]
    output = judge.ask(IMAGES, turns, keep_cache=True)
    assert (output.kv_cache is not None) == (family not in ("llava", "paligemma"))
    followup = judge.ask_followup(output, torch.tensor([1, 3]), "yes", POTENTIAL)
    expected = torch.cat([ask_clarity(judge, [i], False, "yes", POTENTIAL) for i in (1, 3)])
    torch.testing.assert_close(followup, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_a_reward_and_a_verifier(family: str, folders: dict[str, Path]) -> None:
    judge = VlmReward(weights=str(folders[family])).load(Placement())
    score = judge.score(IMAGES[:, None], PROMPTS, [{}] * 4)
    assert score.isfinite().all() and score.std() > 1e-4
    assert judge.judge(IMAGES[:, None], PROMPTS, (), 0.4).score.shape == (4,)


def test_pixel_gradient_requires_torch_preprocessing(folders: dict[str, Path]) -> None:
    VlmReward(weights=str(folders["llava_onevision"]), pixel_gradient=True).load(Placement())
    with pytest.raises(ConfigError, match=r"PyTorch.*TM708"):
        VlmReward(weights=str(folders["qwen2_vl"]), pixel_gradient=True).load(Placement())


def test_logits_match_first_step_of_greedy_generation(folders: dict[str, Path]) -> None:
    judge = load_chat_model(str(folders["qwen2_5_vl"]), Placement())
    texts = [judge.processor.render((CLARITY.replace("{prompt}", prompt),)) for prompt in PROMPTS]
    inputs = judge.processor.encode(IMAGES, texts)
    out = judge.net.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        **inputs.extra_inputs,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    torch.testing.assert_close(ask_clarity(judge, [0, 1, 2, 3], False), out.logits[0], atol=1e-4, rtol=1e-4)


def test_padded_image_is_one_tile(folders: dict[str, Path]) -> None:
    judge = load_chat_model(str(folders["llava_onevision"]), Placement())
    assert isinstance(judge.processor, OneVisionProcessor)
    inputs = judge.processor.encode(IMAGES, [judge.processor.render((CLARITY,))] * 4)
    sizes, count = torch.tensor([[56, 56]] * 4), torch.tensor([4])  # several images are not split into tiles
    with torch.no_grad():
        expected = judge.net(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.extra_inputs["position_ids"],
            pixel_values=judge.processor.preprocess(IMAGES),
            image_sizes=sizes,
            batch_num_images=count,
            logits_to_keep=1,
        )
    assert torch.equal(judge.ask(IMAGES, [(CLARITY,)] * 4).logits, expected.logits[:, -1])


@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 90), (90, 41), (1, 1)])
def test_images_are_padded_and_resized_as_in_published_judges(height: int, width: int) -> None:
    from transformers import SiglipImageProcessorPil

    coarse = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)
    side = max(height, width)
    square = Image.new("RGB", (side, side), (127, 127, 127))
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    expected = SiglipImageProcessorPil(size={"height": 30, "width": 30}, resample=3)(square, return_tensors="pt")
    net, tokenizer = tiny_chat(Placement())
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
    difference = (OneVisionProcessor(net, tokenizer).preprocess(pixels) - expected["pixel_values"]).abs().mean() / 2
    assert difference <= 1e-3


def test_all_published_keys_are_converted() -> None:
    keymap = json.loads((FIXTURES / "llava/onevision_7b_keymap.json").read_text(encoding="utf-8"))["map"]
    empty = torch.zeros(0)
    assert len(keymap) == 765
    for old, new in keymap.items():
        converted = convert_keys({old: empty}, Path("parm"))
        converted.pop("lm_head.weight" if new != "lm_head.weight" else "", None)
        assert [*converted] == [new]


def save_llava_next_layout(folder: Path, path: Path, config: dict[str, Any]) -> None:
    """Rewrite a transformers checkpoint in LLaVA-NeXT's layout: its key names, flat config and shards."""
    renames = [
        (r"model\.vision_tower\.(.+)", r"model.vision_tower.vision_tower.vision_model.\1"),
        (r"model\.multi_modal_projector\.linear_1\.(.+)", r"model.mm_projector.0.\1"),
        (r"model\.multi_modal_projector\.linear_2\.(.+)", r"model.mm_projector.2.\1"),
        (r"model\.language_model\.(.+)", r"model.\1"),
    ]
    with silence_transformers():
        state = {k: v.clone() for k, v in load_chat_model(str(folder), Placement()).net.state_dict().items()}
    renamed = {}
    for key, value in state.items():
        old = next(
            (re.sub(pattern, replacement, key) for pattern, replacement in renames if re.fullmatch(pattern, key)), key
        )
        renamed[old] = value
    tower = "model.vision_tower.vision_tower.vision_model."
    renamed[f"{tower}head.probe"] = torch.zeros(1, 1, 72)
    renamed[f"{tower}encoder.layers.26.layer_norm1.weight"] = torch.zeros(72)
    renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    names = sorted(renamed)
    half = len(names) // 2
    shards = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for shard, keys in shards.items():
        save_file({key: renamed[key] for key in keys}, path / shard)
    weight_map = {key: shard for shard, keys in shards.items() for key in keys}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 20, "top_p": 0.8}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((folder / file).read_bytes())


LLAVA_NEXT_CONFIG = {
    "architectures": ["LlavaQwenForCausalLM"], "model_type": "llava",
    "mm_vision_tower": "google/siglip-tiny-patch14-30", "mm_projector_type": "mlp2x_gelu",
    "image_aspect_ratio": "anyres_max_9", "hidden_size": 32, "intermediate_size": 64,
    "max_position_embeddings": 32768, "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip


@pytest.fixture(scope="module")
def parm(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parm")
    save_llava_next_layout(folders["llava_onevision"], path, LLAVA_NEXT_CONFIG | {"vocab_size": len(tiny_tokenizer())})
    return path


@pytest.mark.parametrize("mode", ["yes_no_logits", "full_softmax", "upstream_generate"])
def test_published_layout_scores_match_transformers_layout(mode: Any, parm: Path, folders: dict[str, Path]) -> None:
    published = VlmReward(weights=str(parm), answer_mode=mode).load(Placement())
    converted = VlmReward(weights=str(folders["llava_onevision"]), answer_mode=mode).load(Placement())
    first, second = (judge.vlm_judge.judge_finished(IMAGES, PROMPTS, "orm") for judge in (published, converted))
    if mode != "upstream_generate":  # the sampling of generation_config.json changes that mode
        assert torch.equal(first.yes, second.yes)
        verdicts = [judge.judge(IMAGES[:, None], PROMPTS, (), 0.5) for judge in (published, converted)]
        assert torch.equal(verdicts[0].score, verdicts[1].score)
    assert published.vlm_judge.model.answer_tokens.top_k == 20 and published.vlm_judge.model.answer_tokens.top_p == 0.8


def test_vision_config_follows_the_vision_tower_name(parm: Path) -> None:
    vision = load_chat_model(str(parm), Placement()).net.config.vision_config
    assert (vision.image_size, vision.patch_size, vision.num_hidden_layers, vision.num_attention_heads) == (
        30,
        14,
        2,
        1,
    )


def test_paligemma_logits_match_the_recording() -> None:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    path = FIXTURES / "paligemma"
    config = PaliGemmaConfig.from_pretrained(path)
    net = load_network(PaliGemmaForConditionalGeneration, config, path, Placement())
    recording = load_file(path / "expected.safetensors")
    with torch.no_grad():
        out = net(
            input_ids=recording["in.input_ids"], attention_mask=recording["in.attention_mask"],
            pixel_values=recording["in.pixel_values"], token_type_ids=torch.zeros_like(recording["in.input_ids"]),
            logits_to_keep=1,
        )  # fmt: skip
    torch.testing.assert_close(
        out.logits[:, -1], recording["out.prefill_logits_token_type0"][:, -1], atol=1e-5, rtol=1e-5
    )


def test_paligemma_prompt_starts_with_image_tokens_and_ends_with_newline(folders: dict[str, Path]) -> None:
    judge = load_chat_model(str(folders["paligemma"]), Placement())
    text = judge.processor.render((QUESTIONS["orm"].replace("{prompt}", "a cat"),))
    ids = judge.processor.encode(IMAGES[:1], [text]).input_ids[0]
    assert judge.tokenizer.decode(ids) == "<image>" * 4 + "<bos>" + text.removeprefix("<image>") + "\n"


def test_unusable_checkpoint_directories_are_refused(parm: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llava-hf/.*16 GB.*TM505"):
        VlmReward().load(Placement())
    with pytest.raises(ConfigError, match=r"config\.json.*TM355"):
        VlmReward(weights=str(tmp_path)).load(Placement())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"vision-language model.*TM709"):
        VlmReward(weights=str(tmp_path)).load(Placement())
    for file in folders["llava_onevision"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folders["llava_onevision"] / "model.safetensors").read_bytes()[:500])
    with pytest.raises(ConfigError, match=r"readable safetensors.*TM506"):
        VlmReward(weights=str(tmp_path)).load(Placement())
    with pytest.raises(ConfigError, match=r"'model\.other\.weight'.*TM716"):
        convert_keys({"model.other.weight": torch.zeros(1)}, parm)


def test_missing_tokenizer_or_tensor_is_refused(parm: Path, tmp_path: Path) -> None:
    for file in parm.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"tokenizer or processor.*TM710"):
        VlmReward(weights=str(tmp_path)).load(Placement())
    shard = tmp_path / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    tensors.popitem()
    save_file(tensors, shard)
    with pytest.raises(ConfigError, match=r"lacks .*TM358"):
        VlmReward(weights=str(tmp_path)).load(Placement())
