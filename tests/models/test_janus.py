"""Janus-Pro: the tokens, logits and pixels of transformers' own generation, published folders, and LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from janus_folders import save_authors_folder, save_folder, tiny_janus
from tiers import fast
from torch import Tensor

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.core.lora import Lora
from tastemaker.core.policy import Guidance, Policy
from tastemaker.core.randomness import Purpose, Randomness
from tastemaker.core.registry import ConfigError
from tastemaker.core.types import Placement
from tastemaker.core.weights import FullFinetuning
from tastemaker.models.janus.checkpoint import RELEASES, SIZES_1B, read_sizes, read_tensors
from tastemaker.models.janus.model import JanusBackbone, JanusSpec
from tastemaker.models.janus.prompt_tokenizer import ByteTokenizer, JanusPromptTokenizer
from tastemaker.models.nets.janus import JanusNet
from tastemaker.models.pipeline_components import parameters_on_meta
from tastemaker.processes.autoregressive import AutoregressiveProcess
from tastemaker.training.events import StepCompleted
from tastemaker.training.loop import train

PROMPTS = ("a red cat", "two dogs under a tree")
GREEDY = AutoregressiveProcess(top_k=1)
OBJECTIVES = ("grpo", "gcpo", "ddpo", "dpo", "kto", "cca", "likelihood", "teacher-forced-grpo", "drpo")
RNG = Randomness(0, 0, torch.arange(2))
# transformers' template around a prompt, which the processor of a folder has; `image` appends the start of an image.
TEMPLATE = "<|User|>: {}\n\n<|Assistant|>:<begin_of_image>"


@pytest.fixture(scope="module")
def published() -> Any:
    return tiny_janus()


@pytest.fixture(scope="module")
def folder(published: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(published, tmp_path_factory.mktemp("janus") / "janus")


@pytest.fixture(scope="module")
def model(folder: Path) -> JanusBackbone:
    return JanusSpec(str(folder), max_text_tokens=64).load(Placement())


def make_policy(model: JanusBackbone, process: AutoregressiveProcess, guidance: Guidance | None = None) -> Policy[Any]:
    weights = FullFinetuning().apply(model, ())
    return Policy(process.wrap_guidance(model, guidance) if guidance else model, process, weights)


def library_inputs(folder: Path) -> dict[str, Tensor]:
    """Token ids and mask as transformers' tokenizer makes them of the template, padded on the left."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts = [tokenizer.bos_token + TEMPLATE.format(prompt) for prompt in PROMPTS]
    return dict(
        tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    )


class RecordedHead:
    """The logits [2 B, V] of every call of transformers' generation head."""

    def __init__(self, published: Any) -> None:
        self.published, self.logits = published, list[Tensor]()

    def __enter__(self) -> RecordedHead:
        head = self.published.model.generation_head
        self.hook = head.register_forward_hook(lambda module, args, out: self.logits.append(out.detach().clone()))
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.remove()


@torch.no_grad()
def test_greedy_tokens_logits_and_pixels_equal_transformers(published: Any, folder: Path, model: JanusBackbone) -> None:
    with RecordedHead(published) as recorded:
        expected = published.generate(**library_inputs(folder), generation_mode="image", do_sample=False)
    policy = make_policy(model, GREEDY, Guidance(5.0))
    cond = policy.embed(PROMPTS)
    assert torch.equal(policy.sample(cond, RNG).final, expected)

    logits = torch.stack(recorded.logits, 1)  # [2 B, 16, V]
    plain = model.embed(PROMPTS)
    for rows, condition in ((logits[:2], plain), (logits[2:], model.without_prompt(plain))):
        torch.testing.assert_close(model.predict(expected, torch.ones(2), condition), rows, rtol=0, atol=5e-5)

    pixels = (published.decode_image_tokens(expected).permute(0, 3, 1, 2) + 1) / 2
    torch.testing.assert_close(model.decode(expected)[:, 0], pixels.clamp(0, 1), rtol=0, atol=5e-5)
    codes = published.model.vqmodel.quantize.get_codebook_entry(expected).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.token_embeddings(expected), codes)


@pytest.mark.slow
@torch.no_grad()
def test_sampled_tokens_equal_transformers_with_the_same_draws(
    published: Any, folder: Path, model: JanusBackbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = AutoregressiveProcess()
    draws = iter(RNG.uniform(Purpose.TOKEN, 16).unbind(1))

    def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
        return process.sampler.sample(probabilities.log(), next(draws))[0][:, None]

    monkeypatch.setattr(torch, "multinomial", multinomial)
    # Without the library's own default of the 50 most likely tokens.
    expected = published.generate(**library_inputs(folder), generation_mode="image", do_sample=True, top_k=0)
    policy = make_policy(model, process, Guidance(5.0))
    assert torch.equal(policy.sample(policy.embed(PROMPTS), RNG).final, expected)


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [None, Guidance(3.0, interval=(0.4, 1.0))])
@torch.no_grad()
def test_cached_calls_equal_the_full_call(model: JanusBackbone, guidance: Guidance | None) -> None:
    policy = make_policy(model, AutoregressiveProcess(recompute_log_probs=False), guidance)
    cond = policy.embed(PROMPTS)
    trajectory = policy.sample(cond, RNG)
    segment = trajectory.segments[0]
    full = policy.model.predict(segment.action, segment.t, cond)
    rescored = full.log_softmax(-1).gather(-1, segment.action[..., None])[..., 0]
    torch.testing.assert_close(segment.log_prob, rescored, rtol=1e-4, atol=1e-4)
    cache, last = policy.model.init_cache(cond), None
    for position in range(16):
        logits, cache = policy.model.decode_step(last, cache, cond)
        torch.testing.assert_close(logits, full[:, position], rtol=1e-4, atol=1e-4)
        last = segment.action[:, position]


@pytest.mark.slow
@torch.no_grad()
def test_pruned_rollout_draws_the_same_tokens(model: JanusBackbone) -> None:
    policy = make_policy(model, AutoregressiveProcess(), Guidance(5.0))
    full = policy.sample(policy.embed(PROMPTS), RNG)
    rollout = policy.rollout(policy.embed(PROMPTS), RNG)
    for _ in range(3):
        rollout.step()
    rollout.select(torch.tensor([1]))
    assert torch.equal(rollout.finish().final, full.final[1:])


def test_prompts_are_read_as_by_transformers(folder: Path, model: JanusBackbone) -> None:
    expected, cond = library_inputs(folder), model.embed(PROMPTS)
    length = expected["input_ids"].shape[1]
    assert torch.equal(cond.tensors["text"][:, -length:], expected["input_ids"])
    assert torch.equal(cond.tensors["attention_mask"][:, -length:].long(), expected["attention_mask"])
    assert not cond.tensors["attention_mask"][:, :-length].any()


def test_long_prompts_lose_their_end_and_keep_the_template() -> None:
    tokenizer = JanusPromptTokenizer(ByteTokenizer(64), 8)
    ids, mask = tokenizer(["abcdefghij", "ab"])
    assert ids[0].tolist() == [1, *ByteTokenizer(64)("abcdef"), 2] and mask[0].all()
    assert ids[1].tolist() == [0, 0, 0, 0, 1, *ByteTokenizer(64)("ab"), 2]
    assert tokenizer.without_prompt(ids)[0].tolist() == [1, 0, 0, 0, 0, 0, 0, 2]


@pytest.mark.slow
def test_layout_of_the_authors_has_the_same_tensors(published: Any, folder: Path, tmp_path: Path) -> None:
    authors = save_authors_folder(published, tmp_path / "authors")
    for ours, theirs in zip(read_tensors(folder), read_tensors(authors), strict=True):
        theirs.pop("quantize.codebook_used", None)
        assert ours.keys() == theirs.keys()
        for name, x in ours.items():
            assert torch.equal(x, theirs[name]), name
    sizes = read_sizes(authors)
    assert replace(sizes, grid_size=4, max_positions=512, vq=read_sizes(folder).vq) == read_sizes(folder)
    assert sizes.grid_size == 24


@pytest.mark.slow
def test_sharded_runs_read_rows_of_tensors(folder: Path, model: JanusBackbone, tmp_path: Path, published: Any) -> None:
    placement = Placement(trainable_device=torch.device("meta"))
    net: Any = JanusSpec(str(folder)).load(placement).net
    assert all(p.is_meta for p in net.parameters())
    for name, p in model.net.named_parameters():
        assert torch.equal(net.deferred_tensors.read(name, 1, 2), p[1:3]), name
    authors = save_authors_folder(published, tmp_path / "authors")
    (authors / "config.json").write_text((folder / "config.json").read_text())  # with the sizes of the tiny tokenizer
    assert not any(p.is_meta for p in JanusSpec(str(authors)).load(placement).net.parameters())


@pytest.mark.slow
def test_published_sizes() -> None:
    """Of what generates images; files of 4.18 and 14.8 GB in half precision hold vision encoder and text head too."""
    counts = {"deepseek-community/Janus-Pro-1B": 1_485_053_952, "deepseek-community/Janus-Pro-7B": 6_591_791_104}
    for source, sizes in RELEASES.items():
        if source.hub in counts:
            with parameters_on_meta():
                net = JanusNet(sizes)
            assert sum(p.numel() for p in net.parameters()) == counts[source.hub]
            assert (sizes.grid_size**2, sizes.image_size, sizes.vq.codebook_size) == (576, 384, 16384)
    assert JanusSpec().sizes == replace(SIZES_1B, prefix_length=128)


@pytest.mark.slow
def test_lora_trains_the_language_model(model: JanusBackbone) -> None:
    tiny = JanusSpec().tiny().load(Placement())
    weights = Lora(rank=2).apply(tiny, ("reference",))
    names = {key.split(".lora_")[0] for key in weights.trainable()}
    assert len(names) == 2 * 7 and all(name.startswith("model.language_model.layers.") for name in names)
    tiny.predict(torch.arange(32).view(2, 16), torch.ones(2), tiny.embed(PROMPTS)).square().mean().backward()
    assert all(p.grad is not None for p in weights.trainable().values())


@pytest.mark.parametrize("objective", fast(OBJECTIVES, "grpo"))
def test_objectives_train_every_weight(objective: str, tmp_path: Path) -> None:
    model = ["model=null", "model={type: janus, weights: tiny, max_text_tokens: 16}"]
    config = load(f"{objective}-toy-causal", [*model, "steps=2", "batch.prompts=4", "sample.every=0", "guard.every=0"])
    run = build(config, tmp_path / "run")
    before = {key: p.detach().clone() for key, p in run.policy.weights.trainable().items()}
    assert [event.step for event in train(run) if isinstance(event, StepCompleted)] == [1, 2]
    assert [key for key, p in run.policy.weights.trainable().items() if before[key].equal(p)] == []


@pytest.mark.slow
def test_wrong_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"model_type is 'llama'.*TM2551"):
        JanusSpec(str(tmp_path)).load(Placement())
    with pytest.raises(ConfigError, match=r"'someone/else'.*Janus-Pro-1B.*TM2550"):
        JanusSpec("random:someone/else").load(Placement())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"tokenizer.json.*TM2552"):
        JanusSpec(str(broken)).load(Placement())
    (broken / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("begin_of_image", "start"))
    with pytest.raises(ConfigError, match=r"<begin_of_image>.*TM2553"):
        JanusSpec(str(broken)).load(Placement())


@pytest.fixture(autouse=True)
def clear_sizes() -> Iterator[None]:
    yield
    read_sizes.cache_clear()
