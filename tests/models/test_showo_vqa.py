"""Visual question answering with Show-o: packed inputs, answers, likelihoods and loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.models.nets.showo import ShowoVocabulary
from tastemaker.models.showo.model import ShowoSpec, infer_showo_spec
from tastemaker.models.showo.prompt_tokenizer import BYTE_TOKENIZER, load_detokenizer, load_text_tokenizer
from tastemaker.models.showo.vision_encoder import ClipVisionEncoder
from tastemaker.models.showo.vqa import QUESTION, SYSTEM_PROMPT, ShowoVqa, image_token_prefix, pack_image_text

VOCABULARY = ShowoVocabulary(50, 49, 32)
IMAGES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
QUESTIONS = ["What is this?", "Describe the picture in a few words.", "How many?"]


@pytest.fixture(scope="module", params=["codes", "features"])
def vqa(request: pytest.FixtureRequest) -> ShowoVqa:
    model = ShowoSpec(vision_encoder="clip" if request.param == "features" else None).tiny().load(Placement())
    generator = torch.Generator().manual_seed(0)
    for name, p in model.net.named_parameters():
        if p.dim() == 2 and "embed" not in name:  # otherwise only the last token matters
            torch.nn.init.normal_(p, std=0.5, generator=generator)
    return ShowoVqa(model, load_detokenizer(BYTE_TOKENIZER, model.vocabulary))


def test_all_positions_attend_to_the_image() -> None:
    """The published layout is <|mmu|> <|soi|> codes <|eoi|> <|endoftext|> text.

    All positions attend to those up to <|eoi|>; other attention is causal.
    """
    ids, attention_mask = pack_image_text(VOCABULARY, image_token_prefix(VOCABULARY, torch.arange(4)[None]), [[7, 8]])
    assert ids.tolist() == [[56, 51, 60, 61, 62, 63, 52, 49, 7, 8]]
    published = torch.ones(10, 10, dtype=torch.bool).tril()
    published[:, :7] = True
    assert torch.equal(attention_mask[0, 0], published)


def test_left_padding_is_masked() -> None:
    ids, attention_mask = pack_image_text(
        VOCABULARY, image_token_prefix(VOCABULARY, torch.arange(8).view(2, 4)), [[7], [1, 2, 3]]
    )
    assert ids[0, :3].tolist() == [50, 50, 56]
    assert not attention_mask[0, 0, 2:, :2].any()
    assert attention_mask[0, 0].any(-1).all()
    single = pack_image_text(VOCABULARY, image_token_prefix(VOCABULARY, torch.arange(4)[None]), [[7]])[1]
    assert torch.equal(attention_mask[0, 0, 2:, 2:], single[0, 0])


def test_batched_answers_equal_single_ones(vqa: ShowoVqa) -> None:
    batched = vqa.answer(IMAGES, QUESTIONS, 6)
    single = [vqa.answer(IMAGES[i : i + 1], QUESTIONS[i : i + 1], 6)[0] for i in range(3)]
    assert batched == single
    assert len(set(batched)) > 1


def decode_uncached(vqa: ShowoVqa, index: int, count: int) -> list[int]:
    """Greedy answer from one call of the network per token, without a cache."""
    text: list[int] = list(vqa.tokenize_questions(QUESTIONS)[index])
    prompt_length = len(text)
    for _ in range(count):
        prefix, image_features = vqa.encode_images(IMAGES[index : index + 1])
        ids, attention_mask = pack_image_text(vqa.vocabulary, prefix, [text])
        with torch.no_grad():
            logits, _ = vqa.model.net(ids, attention_mask, image_features=image_features)
        text.append(int(logits[0, -1, : vqa.vocabulary.text_vocab_size].argmax()))
        if text[-1] == vqa.vocabulary.eos_id:
            break
    return vqa.truncate_at_eos(text[prompt_length:])


def test_kv_cache_gives_the_same_answers(vqa: ShowoVqa) -> None:
    for index in range(3):
        answers = vqa.answer(IMAGES[index : index + 1], QUESTIONS[index : index + 1], 5)
        assert answers == [vqa.detokenize(decode_uncached(vqa, index, 5))]


def test_logits_processor_changes_answers(vqa: ShowoVqa) -> None:
    def negate(ids: Tensor, logits: Tensor) -> Tensor:
        return -logits

    assert vqa.answer(IMAGES, QUESTIONS, 4, negate) != vqa.answer(IMAGES, QUESTIONS, 4)


def test_answer_likelihood_is_trainable(vqa: ShowoVqa) -> None:
    answers = ["red", "a cup", ""]
    batched = vqa.likelihood(IMAGES, QUESTIONS, answers)
    single = [vqa.likelihood(IMAGES[i : i + 1], QUESTIONS[i : i + 1], answers[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(batched, torch.cat(single), rtol=1e-4, atol=1e-4)
    batched.sum().backward()
    assert all(p.grad is not None for p in vqa.model.net.parameters())
    vqa.model.net.zero_grad()


def test_answer_likelihood_equals_network_log_probs(vqa: ShowoVqa) -> None:
    with torch.no_grad():
        likelihood = vqa.likelihood(IMAGES[:1], QUESTIONS[:1], [""])
        tokens = [*vqa.tokenize_questions(QUESTIONS[:1])[0], *vqa.model.prompt_tokenizer.tokenizer(" ")]
        prefix, image_features = vqa.encode_images(IMAGES[:1])
        ids, attention_mask = pack_image_text(vqa.vocabulary, prefix, [tokens])
        log_probs = vqa.model.net(ids, attention_mask, image_features=image_features)[0].log_softmax(-1)[0]
    expected = log_probs[-2, ids[0, -1]] + log_probs[-1, vqa.vocabulary.eos_id]
    torch.testing.assert_close(likelihood[0], expected, rtol=1e-4, atol=1e-4)


def test_question_template_is_the_published_one() -> None:
    assert QUESTION.format("What?") == "USER: \nWhat? ASSISTANT:"


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* no tokenizer.*TM531"):
        load_text_tokenizer(str(tmp_path), VOCABULARY)


def test_spec_is_inferred_from_name_or_folder(tmp_path: Path) -> None:
    assert infer_showo_spec("showlab/show-o") == ShowoSpec()
    assert infer_showo_spec("showlab/show-o-512x512") == ShowoSpec("showlab/show-o-512x512", image_size=512)
    assert infer_showo_spec("llava-hf/llava-onevision-qwen2-7b-ov-hf") is None
    assert infer_showo_spec(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "Showo", "num_vq_tokens": 1024}))
    assert infer_showo_spec(str(tmp_path)) == ShowoSpec(str(tmp_path), image_size=512)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "Showo", "w_clip_vit": True}))
    assert infer_showo_spec(str(tmp_path)) == ShowoSpec(
        str(tmp_path), vision_encoder="openai/clip-vit-large-patch14-336"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    assert infer_showo_spec(str(tmp_path)) is None


def test_image_features_follow_the_system_prompt() -> None:
    """The published layout is <|mmu|> system <|soi|> features <|eoi|> text.

    All positions attend to those before <|eoi|>; other attention is causal.
    """
    model = ShowoSpec(vision_encoder="clip").tiny().load(Placement())
    vqa, vocabulary = ShowoVqa(model, load_detokenizer(BYTE_TOKENIZER, model.vocabulary)), model.vocabulary
    prefix, features = vqa.encode_images(IMAGES[:1])
    assert features is not None and features.shape == (1, 4, 24)
    system_prompt = [vocabulary.mmu_id, *model.prompt_tokenizer.tokenizer(SYSTEM_PROMPT), vocabulary.soi_id]
    assert prefix[0].tolist() == [*system_prompt, *[vocabulary.mask_id] * 4, vocabulary.eoi_id]
    _, attention_mask = pack_image_text(vocabulary, prefix, [[1, 2]])
    published = torch.ones(attention_mask.shape[-2:], dtype=torch.bool).tril()
    published[:, : len(system_prompt) + 4] = True
    assert torch.equal(attention_mask[0, 0], published)


def test_vision_encoder_loads_from_full_clip(tmp_path: Path) -> None:
    encoder = ClipVisionEncoder("tiny", Placement(), seed=3)
    encoder.net.save_pretrained(tmp_path)
    tensors = {f"vision_model.{key.removeprefix('vision_model.')}": x for key, x in encoder.net.state_dict().items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(
        {**tensors, "text_model.embeddings.token_embedding.weight": torch.zeros(2, 2)}, tmp_path / "pytorch_model.bin"
    )
    assert torch.equal(ClipVisionEncoder(str(tmp_path), Placement())(IMAGES), encoder(IMAGES))
    torch.save({"text_model.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.vision_encoder: .* lacks.*TM534"):
        ClipVisionEncoder(str(tmp_path), Placement())


def test_tokenizer_loads_from_file_or_folder(tmp_path: Path) -> None:
    vocab = {word: number for number, word in enumerate(["a", "red", "cup", "[UNK]"])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_text_tokenizer(str(name), ShowoVocabulary(4, 0, 8))("a red cup") == [0, 1, 2]
        assert load_detokenizer(str(name), ShowoVocabulary(4, 0, 8))([1, 2]) == "red cup"
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* 4 .*TM532"):
        load_text_tokenizer(str(tmp_path), VOCABULARY)
