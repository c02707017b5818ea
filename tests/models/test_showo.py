"""Show-o against its published code on tiny weights: prompts, logits, generation, preferences, tokenizer, files."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tastemaker.core.guidance import NEGATIVE
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import MASK_TOKEN_ID, Condition, Corrupted, Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.nets.magvit import Magvit, MagvitConfig
from tastemaker.models.nets.showo import ShowoConfig, ShowoVocabulary, omni_attention_mask, trim_left_padding
from tastemaker.models.nets.showo import ShowoTransformer as Network
from tastemaker.models.showo.model import ShowoBackbone, ShowoSpec
from tastemaker.models.showo.prompt_tokenizer import BYTE_TOKENIZER, ShowoPromptTokenizer
from tastemaker.processes.masked import MaskedProcess, UncachedMaskedPredictor

SHOWO = Path(__file__).parent.parent / "fixtures" / "showo"
TEXTS = ("3 4 5", "", "1 2 3 4 5 6 7 8 9 10 11", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16", "49 7 8")
WORDS = ShowoVocabulary(50, 49, 32)  # of the recorded model
TEXT, PICTURE = 13, slice(14, 30)  # places of words, and of codes
RECORDED = ShowoSpec(
    weights=str(SHOWO / "showo_tiny_state.safetensors"),
    autoencoder=str(SHOWO / "magvit_tiny_state.safetensors"),
    tokenizer=BYTE_TOKENIZER,
    image_size=16,
    downsample_factor=4,
    max_text_tokens=12,
    codebook_size=32,
    text_vocab_size=50,
    eos_token_id=49,
    width=64,
    depth=3,
    heads=4,
    intermediate_size=160,
    autoencoder_channels=32,
    encoder_levels=((1, 2), (2, 1), (2, 2)),
    decoder_levels=((1, 1), (1, 2), (2, 1)),
)


def golden(name: str) -> dict[str, Tensor]:
    return load_file(SHOWO / f"{name}.safetensors")


@pytest.fixture(scope="module")
def recorded() -> ShowoBackbone:
    return RECORDED.load(Placement())


def test_prompt_tokens_equal_published_ones() -> None:
    seen = golden("prompt_mask_logits")
    prompter = ShowoPromptTokenizer(WORDS, lambda text: [int(word) for word in text.split()], TEXT)
    assert torch.equal(prompter(TEXTS), seen["cond_ids"][:, :TEXT])
    assert torch.equal(prompter([""] * 5), seen["uncond_ids"][:, :TEXT])
    assert torch.equal(WORDS.wrap_image_tokens(torch.full((5, 16), MASK_TOKEN_ID)), seen["cond_ids"][:, TEXT:])


def test_special_and_image_token_ids() -> None:
    words = ShowoVocabulary()
    assert (words.pad_id, words.soi_id, words.eoi_id, words.t2i_id, words.mmu_id) == (
        50295, 50296, 50297, 50300, 50301,
    )  # fmt: skip
    assert (words.image_ids, words.mask_id, words.size) == (slice(50305, 58497), 58497, 58498)


def test_attention_mask_equals_published_one() -> None:
    seen = golden("prompt_mask_logits")
    ids = torch.cat([seen["cond_ids"], seen["uncond_ids"]])
    assert torch.equal(omni_attention_mask((ids == WORDS.pad_id).sum(1), TEXT, 31), seen["mask_bool"])


def test_logits_equal_published_ones(recorded: ShowoBackbone) -> None:
    seen = golden("prompt_mask_logits")
    ids = torch.cat([seen["cond_ids"], seen["uncond_ids"]])
    with torch.no_grad():
        logits, _ = recorded.net(ids, seen["mask_bool"])
    torch.testing.assert_close(logits, seen["logits"], rtol=1e-5, atol=1e-5)


def test_trimmed_padding_does_not_change_logits(recorded: ShowoBackbone) -> None:
    text = golden("prompt_mask_logits")["cond_ids"][:2, :TEXT]
    longer = torch.nn.functional.pad(text, (40 - TEXT, 0), value=WORDS.pad_id)
    x = torch.full((2, 16), MASK_TOKEN_ID)
    assert trim_left_padding(longer, WORDS.pad_id)[2] == 32
    ids = torch.cat([longer, WORDS.wrap_image_tokens(x)], 1)
    allowed = omni_attention_mask((longer == WORDS.pad_id).sum(1), 40, ids.shape[1])
    with torch.no_grad():
        logits = recorded.predict(x, torch.ones(2), Condition(("", ""), {"text": longer}))
        whole, _ = recorded.net(ids, allowed, positions=slice(41, 57), vocabulary=WORDS.image_ids)
    torch.testing.assert_close(logits, whole, rtol=1e-5, atol=1e-5)


def test_predict_returns_image_token_logits(recorded: ShowoBackbone) -> None:
    seen = golden("prompt_mask_logits")
    with torch.no_grad():
        cond = Condition(TEXTS, {"text": seen["cond_ids"][:, :TEXT]})
        logits = recorded.predict(torch.full((5, 16), MASK_TOKEN_ID), torch.ones(5), cond)
    torch.testing.assert_close(logits, seen["logits"][:5, PICTURE, WORDS.image_ids], rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Replayed(Randomness):
    """The numbers by which a recorded generation was drawn."""

    seen: dict[str, Tensor] | None = None

    def uniform(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        assert self.seen is not None
        if purpose == "reveal":
            return self.seen["gumbel"][draw].double().neg().exp().neg().exp().float()
        chances, drawn = self.seen["mn_probs"][draw], self.seen["mn_out"][draw]
        below = chances.double().cumsum(1).gather(1, drawn) - chances.double().gather(1, drawn) / 2
        return below.float().view(len(self.rows), *shape)


def recorded_run(model: ShowoBackbone, name: str, weight: float, steps: int) -> tuple[Policy[Any], Condition, Replayed]:
    seen = golden(name)
    tensors = {"text": seen["in_ids"][:, :TEXT]}
    if weight:
        tensors[NEGATIVE + "text"] = seen["step_ids"][0, 2:, :TEXT]
    process = MaskedProcess(steps, recompute_log_probs=False)
    guided = process.wrap_guidance(model, Guidance(1 + weight)) if weight else model
    drawn = Replayed(0, 0, torch.arange(2), seen)
    return Policy(guided, process, FullFinetuning().apply(model, ())), Condition(("", ""), tensors), drawn


@pytest.mark.parametrize(("name", "weight", "steps"), [("gen_cfg175_T6", 1.75, 6), ("gen_nocfg_T4", 0.0, 4)])
@pytest.mark.parametrize("cached", [True, False])
def test_sampling_repeats_recorded_generation(
    recorded: ShowoBackbone, name: str, weight: float, steps: int, cached: bool
) -> None:
    seen = golden(name)
    learner, cond, drawn = recorded_run(recorded, name, weight, steps)
    with torch.no_grad():
        rollout: Any = learner.rollout(cond, drawn)
        if not cached:
            rollout.predictor = UncachedMaskedPredictor(learner.model, cond)
        for step in range(steps):
            logits = rollout.predictor.predict(rollout.ids, torch.ones(2))
            chances = logits.softmax(-1).flatten(0, 1)
            torch.testing.assert_close(chances, seen["mn_probs"][step], rtol=1e-4, atol=1e-6)
            assert torch.equal(WORDS.wrap_image_tokens(rollout.ids), seen["step_ids"][step, :2, TEXT:])
            rollout.step()
            if step < steps - 1:  # the last guess is the picture; what would be hidden of it nobody sees
                assert torch.equal(rollout.ids == MASK_TOKEN_ID, seen["masking"][step])
    assert torch.equal(rollout.preview(), seen["out"])


def preference(side: str) -> tuple[Tensor, Corrupted, Condition]:
    seen = golden("dpo_step")
    ids, labels = seen[f"{side}_ids"], seen[f"{side}_labels"]
    hidden = labels[:, PICTURE] != -100
    x = seen[f"raw_{side}_codes"] % WORDS.image_ids.start  # recorded with or without their place in the vocabulary
    noisy = Corrupted(torch.where(hidden, MASK_TOKEN_ID, x), hidden.float().mean(1), hidden)
    assert torch.equal(WORDS.wrap_image_tokens(noisy.x), ids[:, TEXT:])
    return x, noisy, Condition(("",) * len(ids), {"text": ids[:, :TEXT]})


def test_dpo_gradients_equal_published_ones() -> None:
    seen = golden("dpo_step")
    model = replace(RECORDED, likelihood_scope="sequence").load(Placement())
    learner: Policy[Any] = Policy(model, MaskedProcess(), FullFinetuning().apply(model, ("reference",)))
    model.net.load_state_dict(golden("dpo_policy_state"))
    sides = {side: preference(side) for side in ("chosen", "rejected")}
    with learner.weights.use("reference"):  # before the graph is built
        was = {side: learner.likelihood(cond, x, noisy) for side, (x, noisy, cond) in sides.items()}
    now = {side: learner.likelihood(cond, x, noisy) for side, (x, noisy, cond) in sides.items()}
    for side in sides:
        torch.testing.assert_close(now[side], seen[f"policy_{side}_logps"], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(was[side], seen[f"ref_{side}_logps"], rtol=1e-5, atol=1e-4)
    counted = (seen["chosen_labels"][:, TEXT:] != -100).sum()
    torch.testing.assert_close(-now["chosen"].sum() / counted, seen["sft_loss"], rtol=1e-5, atol=1e-5)
    margin = 0.1 * ((now["chosen"] - was["chosen"]) - (now["rejected"] - was["rejected"]))
    loss = -torch.nn.functional.logsigmoid(margin).mean()
    torch.testing.assert_close(loss, seen["loss"], rtol=1e-5, atol=1e-6)
    loss.backward()
    found = dict(model.net.named_parameters())
    assert {f"grad.{key}" for key in found} == {key for key in seen if key.startswith("grad.")}
    for key, p in found.items():
        torch.testing.assert_close(p.grad, seen[f"grad.{key}"], rtol=1e-4, atol=1e-6)


def seen(cond: Condition) -> Tensor:
    return omni_attention_mask((cond.tensors["text"] == WORDS.pad_id).sum(1), TEXT, TEXT + 18)


def test_codebook_likelihood_scope() -> None:
    model = RECORDED.load(Placement())
    x, noisy, cond = preference("chosen")
    with torch.no_grad():
        own = MaskedProcess().likelihood(model, cond, x, noisy)
        published = replace(RECORDED, likelihood_scope="sequence").load(Placement()).likelihood(x, noisy, cond)
        chances = model.predict(noisy.x, noisy.t, cond).log_softmax(-1).gather(-1, x[..., None])[..., 0]
        whole = replace(RECORDED, likelihood_scope="vocabulary").load(Placement()).likelihood(x, noisy, cond)
        every = model.net(torch.cat([cond.tensors["text"], WORDS.wrap_image_tokens(noisy.x)], 1), seen(cond))[
            0
        ].log_softmax(-1)
    torch.testing.assert_close(own, (chances * noisy.noise).sum(1))
    ids = every[:, PICTURE].gather(-1, x[..., None] + WORDS.image_ids.start)[..., 0]
    torch.testing.assert_close(whole, (ids * noisy.noise).sum(1), rtol=1e-5, atol=1e-5)
    assert published is not None and (own > published).all()  # fewer are counted, of fewer that could have been


def test_magvit_tokens_equal_published_ones(recorded: ShowoBackbone) -> None:
    seen = golden("magvit_io")
    pixels = (seen["pixels"] / 2 + 0.5)[:, None]
    assert torch.equal(recorded.encode(pixels), seen["codes"])
    shown = recorded.decode(seen["codes"])[:, 0]
    torch.testing.assert_close(shown, (seen["decoded"] / 2 + 0.5).clamp(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal((shown * 255).byte().movedim(1, -1), seen["decoded_uint8"])
    assert isinstance(recorded.autoencoder, Magvit)
    torch.testing.assert_close(
        recorded.autoencoder.encode_continuous(pixels[:, 0]), seen["enc_hidden"], rtol=1e-4, atol=1e-5
    )
    assert torch.equal(recorded.autoencoder.quantize.embedding, seen["codebook"])


def test_magvit_decodes_rectangular_images(recorded: ShowoBackbone) -> None:
    seen = golden("magvit_io")
    assert isinstance(recorded.autoencoder, Magvit)
    ids = torch.tensor([[9, 25, 19, 26, 29, 19]])  # not in the recording: searched for until they gave it
    shown = recorded.autoencoder.decode(ids, (2, 3))
    torch.testing.assert_close(shown, (seen["decoded_rect_2x3"] / 2 + 0.5).clamp(0, 1), rtol=1e-5, atol=1e-5)


def listed(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a list of them."""
    rows = re.findall(r"^(\S+\.\S+) \(([\d, ]+)\)", (SHOWO / name).read_text(), re.MULTILINE)
    return {key: tuple(int(size) for size in shape.replace(" ", "").split(",") if size) for key, shape in rows}


def test_published_sizes_have_published_keys_and_shapes() -> None:
    with torch.device("meta"):
        nets = {"showo_full_keys.txt": Network(ShowoConfig()), "magvit_keys.txt": Magvit(MagvitConfig())}
    for name, net in nets.items():
        assert {key: tuple(x.shape) for key, x in net.state_dict().items()} == listed(name)


@pytest.mark.parametrize("form", ["file", "folder", "pickle"])
def test_published_files_load(form: str, tmp_path: Path) -> None:
    tensors = golden("showo_tiny_state")
    where = tmp_path / ("pytorch_model.bin" if form == "pickle" else "pytorch_model.safetensors")
    if form == "pickle":
        torch.save({key: x.bfloat16() for key, x in tensors.items()}, where)
    else:
        save_file(tensors, where)
    model = replace(RECORDED, weights=str(where if form == "file" else tmp_path)).load(Placement())
    for key, x in model.net.state_dict().items():
        assert torch.equal(x, tensors[key] if form != "pickle" else tensors[key].bfloat16().float())


def test_weights_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"of another network: it has 'showo.model.layers.2.* unknown here"):
        replace(RECORDED, depth=2).load(Placement())


def test_inpainting_masks_white_area(recorded: ShowoBackbone) -> None:
    pixels = golden("magvit_io")["pixels"][:1] / 2 + 0.5
    mask = torch.zeros(1, 3, 16, 16)
    mask[..., 8:] = 1
    process = MaskedProcess(4)
    learner: Policy[Any] = Policy(
        process.wrap_guidance(recorded, Guidance(2.0)), process, FullFinetuning().apply(recorded, ())
    )
    cond = learner.embed(["1 2", "3"], [{"image": pixels, "mask": mask}, {}])
    made = learner.sample(cond, Randomness(0, 0, torch.arange(2)))
    there = recorded.encode(pixels[:, None])[0].view(4, 4)
    assert torch.equal(made.start[0].view(4, 4)[:, :2], there[:, :2])
    assert (made.start[0].view(4, 4)[:, 2:] == MASK_TOKEN_ID).all() and (made.start[1] == MASK_TOKEN_ID).all()
    assert torch.equal(made.final[0].view(4, 4)[:, :2], there[:, :2])
    assert (made.final >= 0).all()
    assert not made.segments[0].mask[0].view(4, 4)[:, :2].any()  # what was known was nobody's decision


def test_images_of_another_size_are_refused(recorded: ShowoBackbone) -> None:
    with pytest.raises(ConfigError, match=r"8x8 pixels have 4 tokens, the model has 16; set data.image_size=16"):
        recorded.encode(torch.zeros(1, 1, 3, 8, 8))
