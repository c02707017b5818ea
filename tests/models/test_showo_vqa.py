"""Show-o's other half: pictures are read, questions understood as far as random weights can, answers written."""

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

WORDS = ShowoVocabulary(50, 49, 32)
PICTURES = torch.rand(3, 3, 40, 56, generator=torch.Generator().manual_seed(0))
QUESTIONS = ["What is this?", "Describe the picture in a few words.", "How many?"]


@pytest.fixture(scope="module", params=["codes", "features"])
def teller(request: pytest.FixtureRequest) -> ShowoVqa:
    model = ShowoSpec(vision_encoder="clip" if request.param == "features" else None).tiny().load(Placement())
    chance = torch.Generator().manual_seed(0)
    for name, p in model.net.named_parameters():
        if p.dim() == 2 and "embed" not in name:  # or the last word alone would count
            torch.nn.init.normal_(p, std=0.5, generator=chance)
    return ShowoVqa(model, load_detokenizer(BYTE_TOKENIZER, model.vocabulary))


def test_all_positions_attend_to_the_image() -> None:
    """As published: <|mmu|> <|soi|> codes <|eoi|> <|endoftext|> text; what is up to <|eoi|> all see, else the past."""
    ids, allowed = pack_image_text(WORDS, image_token_prefix(WORDS, torch.arange(4)[None]), [[7, 8]])
    assert ids.tolist() == [[56, 51, 60, 61, 62, 63, 52, 49, 7, 8]]
    published = torch.ones(10, 10, dtype=torch.bool).tril()
    published[:, :7] = True
    assert torch.equal(allowed[0, 0], published)


def test_left_padding_is_masked() -> None:
    ids, allowed = pack_image_text(WORDS, image_token_prefix(WORDS, torch.arange(8).view(2, 4)), [[7], [1, 2, 3]])
    assert ids[0, :3].tolist() == [50, 50, 56]
    assert not allowed[0, 0, 2:, :2].any()
    assert allowed[0, 0].any(-1).all()
    alone = pack_image_text(WORDS, image_token_prefix(WORDS, torch.arange(4)[None]), [[7]])[1]
    assert torch.equal(allowed[0, 0, 2:, 2:], alone[0, 0])


def test_batched_answers_equal_single_ones(teller: ShowoVqa) -> None:
    together = teller.answer(PICTURES, QUESTIONS, 6)
    alone = [teller.answer(PICTURES[i : i + 1], QUESTIONS[i : i + 1], 6)[0] for i in range(3)]
    assert together == alone
    assert len(set(together)) > 1


def written(teller: ShowoVqa, row: int, count: int) -> list[int]:
    """The likeliest answer, everything read again for every word."""
    text: list[int] = list(teller.tokenize_questions(QUESTIONS)[row])
    before = len(text)
    for _ in range(count):
        opening, seen = teller.encode_images(PICTURES[row : row + 1])
        ids, allowed = pack_image_text(teller.vocabulary, opening, [text])
        with torch.no_grad():
            logits, _ = teller.model.net(ids, allowed, image_features=seen)
        text.append(int(logits[0, -1, : teller.vocabulary.text_vocab_size].argmax()))
        if text[-1] == teller.vocabulary.eos_id:
            break
    return teller.truncate_at_eos(text[before:])


def test_kv_cache_gives_the_same_answers(teller: ShowoVqa) -> None:
    for row in range(3):
        said = teller.answer(PICTURES[row : row + 1], QUESTIONS[row : row + 1], 5)
        assert said == [teller.detokenize(written(teller, row, 5))]


def test_logits_processor_changes_answers(teller: ShowoVqa) -> None:
    def last(ids: Tensor, logits: Tensor) -> Tensor:
        return -logits

    assert teller.answer(PICTURES, QUESTIONS, 4, last) != teller.answer(PICTURES, QUESTIONS, 4)


def test_answer_likelihood_is_trainable(teller: ShowoVqa) -> None:
    answers = ["red", "a cup", ""]
    whole = teller.likelihood(PICTURES, QUESTIONS, answers)
    alone = [teller.likelihood(PICTURES[i : i + 1], QUESTIONS[i : i + 1], answers[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-4, atol=1e-4)
    whole.sum().backward()
    assert all(p.grad is not None for p in teller.model.net.parameters())
    teller.model.net.zero_grad()


def test_answer_likelihood_equals_network_log_probs(teller: ShowoVqa) -> None:
    with torch.no_grad():
        found = teller.likelihood(PICTURES[:1], QUESTIONS[:1], [""])
        spoken = [*teller.tokenize_questions(QUESTIONS[:1])[0], *teller.model.prompt_tokenizer.tokenizer(" ")]
        opening, seen = teller.encode_images(PICTURES[:1])
        ids, allowed = pack_image_text(teller.vocabulary, opening, [spoken])
        chances = teller.model.net(ids, allowed, image_features=seen)[0].log_softmax(-1)[0]
    expected = chances[-2, ids[0, -1]] + chances[-1, teller.vocabulary.eos_id]
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


def test_question_template_is_the_published_one() -> None:
    assert QUESTION.format("What?") == "USER: \nWhat? ASSISTANT:"


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* holds no tokenizer"):
        load_text_tokenizer(str(tmp_path), WORDS)


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
    """As published: <|mmu|> system <|soi|> features <|eoi|> text; all see what is before <|eoi|>, else the past."""
    model = ShowoSpec(vision_encoder="clip").tiny().load(Placement())
    teller, words = ShowoVqa(model, load_detokenizer(BYTE_TOKENIZER, model.vocabulary)), model.vocabulary
    opening, seen = teller.encode_images(PICTURES[:1])
    assert seen is not None and seen.shape == (1, 4, 24)
    before = [words.mmu_id, *model.prompt_tokenizer.tokenizer(SYSTEM_PROMPT), words.soi_id]
    assert opening[0].tolist() == [*before, *[words.mask_id] * 4, words.eoi_id]
    _, allowed = pack_image_text(words, opening, [[1, 2]])
    published = torch.ones(allowed.shape[-2:], dtype=torch.bool).tril()
    published[:, : len(before) + 4] = True
    assert torch.equal(allowed[0, 0], published)


def test_vision_encoder_loads_from_full_clip(tmp_path: Path) -> None:
    small = ClipVisionEncoder("tiny", Placement(), seed=3)
    small.net.save_pretrained(tmp_path)
    tensors = {f"vision_model.{key.removeprefix('vision_model.')}": x for key, x in small.net.state_dict().items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(
        {**tensors, "text_model.embeddings.token_embedding.weight": torch.zeros(2, 2)}, tmp_path / "pytorch_model.bin"
    )
    assert torch.equal(ClipVisionEncoder(str(tmp_path), Placement())(PICTURES), small(PICTURES))
    torch.save({"text_model.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.vision_encoder: .* lacks"):
        ClipVisionEncoder(str(tmp_path), Placement())


def test_tokenizer_loads_from_file_or_folder(tmp_path: Path) -> None:
    known = {word: number for number, word in enumerate(["a", "red", "cup", "[UNK]"])}
    words = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_text_tokenizer(str(name), ShowoVocabulary(4, 0, 8))("a red cup") == [0, 1, 2]
        assert load_detokenizer(str(name), ShowoVocabulary(4, 0, 8))([1, 2]) == "red cup"
    with pytest.raises(ConfigError, match=r"model\.tokenizer: .* has 4 tokens"):
        load_text_tokenizer(str(tmp_path), WORDS)
