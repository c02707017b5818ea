"""VideoCrafter2 under the contract: held against what its authors' code and VADER's said of the same weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pipelines
import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from tastemaker.export.adapters import Attached, write_authors
from tastemaker.guidance import unguided
from tastemaker.lora import LoraWeights
from tastemaker.models import lvdm
from tastemaker.models.nets.unet3d import ClipUnet
from tastemaker.models.published import Codec
from tastemaker.models.sizes import MODELSCOPE, SIZES
from tastemaker.models.unet3d import ClipUnetBackbone, Size
from tastemaker.models.videocrafter import CLIP_WORDS, VIDEOCRAFTER, Videocrafter
from tastemaker.objective import Alone, Context, Nothing
from tastemaker.objectives.reward_gradient import RewardGradient
from tastemaker.policy import Guidance, Policy
from tastemaker.processes.dynamics import Ddim, Stride
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.paths import VariancePreserving
from tastemaker.randomness import Randomness
from tastemaker.registry import ConfigError
from tastemaker.reward import Graded, Rubric
from tastemaker.types import Condition, Facts, Placement, PromptBatch, Prompts
from tastemaker.weights import Full

VIDEO = Path(__file__).parent.parent / "fixtures" / "video"
SHRINKING = VariancePreserving("scaled_linear", 0.00085, 0.012, 1000, spacing="leading", offset=1, shrinks=0.7)
UNET: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock3D",) * 2,
    "up_block_types": ("CrossAttnUpBlock3D",) * 2,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "fps_cond": True,
}
VAE: dict[str, Any] = {
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "scaling_factor": 0.18215,
}
TEXT: dict[str, Any] = {
    **pipelines.CLIP_ENDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
}
FRAMES = Size(4, 64, 64)


def told(name: str) -> Any:
    return json.loads((VIDEO / name).read_text(encoding="utf-8"))


def drawn(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """The weights the recordings were made with: drawn in order, rounded to fp16."""
    chance, found = torch.Generator().manual_seed(seed), {}
    for key, shape in shapes.items():
        x = torch.randn(tuple(shape), generator=chance)
        if len(shape) > 1:
            x = x * (1 / math.sqrt(math.prod(shape[1:])))
        else:
            x = 1 + 0.1 * x if key.endswith("weight") else 0.1 * x
        found[key] = x.half().float()
    return found


def unet_tensors() -> dict[str, Tensor]:
    return drawn(told("lvdm_unet_tiny.json")["keys"], 0)


def vae_tensors() -> dict[str, Tensor]:
    return drawn(told("lvdm_vae_tiny.json"), 31)


def text_tensors() -> dict[str, Tensor]:
    """Of open_clip's encoder, which has one layer more than is used."""
    side, wide, words = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"positional_embedding": (77, side), "text_projection": (side, side)}
    shapes |= {"token_embedding.weight": (words, side), "ln_final.weight": (side,), "ln_final.bias": (side,)}
    for layer in range(TEXT["num_hidden_layers"] + 1):
        block = {"attn.in_proj_weight": (3 * side, side), "attn.in_proj_bias": (3 * side,)}
        linear = {"attn.out_proj": (side, side), "mlp.c_fc": (wide, side), "mlp.c_proj": (side, wide)}
        for name, shape in {**linear, "ln_1": (side,), "ln_2": (side,)}.items():
            block |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        shapes |= {f"transformer.resblocks.{layer}.{name}": shape for name, shape in block.items()}
    return {**drawn(shapes, 5), "logit_scale": torch.tensor(4.6)}


def checkpoint(path: Path, prefix: str = "", wrapper: str = "state_dict") -> Path:
    """A small model.ckpt as published, with the tables of its sampler and what Lightning adds."""
    parts = {lvdm.UNET: unet_tensors(), lvdm.VAE: vae_tensors(), lvdm.TEXT: text_tensors()}
    tensors = {prefix + part + key: x for part, found in parts.items() for key, x in found.items()}
    tables = {f"{prefix}betas": torch.zeros(1000), f"{prefix}scale_arr": torch.ones(1400)}
    torch.save({wrapper: {**tensors, **tables}, "epoch": 3, "pytorch-lightning_version": "1.8.3"}, path)
    pipelines.clip_words().save_pretrained(path.parent)
    return path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published checkpoints are as small as the recordings' networks."""
    monkeypatch.setitem(SIZES, VIDEOCRAFTER.hub, {"unet": UNET, "vae": VAE, "text_encoder": TEXT})


def network() -> Any:
    with init_empty_weights():
        net = ClipUnet(**UNET)
    net.load_state_dict(lvdm.unet(unet_tensors(), list(net.state_dict()), net.config), assign=True)
    return net.requires_grad_(True)


@dataclass
class Said:
    """Prompts by what was recorded of their words."""

    words: dict[str, Tensor]  # [1, length, width] each

    def __call__(self, prompts: Prompts) -> dict[str, Tensor]:
        return {"words": torch.cat([self.words[prompt] for prompt in prompts])}


def shown(latents: Tensor) -> Tensor:
    """All four channels laid out as three, with noughts where they have nothing: [..., 3, 16, 8] of [..., 4, 8, 8]."""
    return nn.functional.pad(latents, (0, 0, 0, 0, 0, 2)).reshape(*latents.shape[:-3], 3, 16, 8)


class Shown:
    """An autoencoder whose pixels are its latents."""

    def decode(self, latents: Tensor) -> Tensor:
        return shown(latents)


def backbone(words: dict[str, Tensor], fps: int) -> ClipUnetBackbone:
    codec: Any = Shown()
    said: Any = Said(words)
    model = ClipUnetBackbone(network(), codec, said, FRAMES, fps)
    model.pixels = (4, 3, 16, 8)  # as it is decoded here
    return model


@dataclass(frozen=True)
class Recorded(Randomness):
    """The noise that was drawn when the sampler was recorded."""

    start: Tensor = torch.empty(0)  # [1, 4, F, h, w]
    noises: Tensor = torch.empty(0)  # [steps, 1, 4, F, h, w]

    def normal(self, purpose: str, *shape: int, draw: int = 0) -> Tensor:
        assert purpose in ("start", "step")
        return (self.start if purpose == "start" else self.noises[draw]).transpose(1, 2)


@dataclass(frozen=True)
class Weighed:
    """The reward of the recordings, of latents: their mean when weighed."""

    by: Tensor  # [1, F, 4, h, w]
    differentiable: ClassVar[bool] = True
    reads: ClassVar[Literal["frames", "clip"]] = "clip"
    runs_on: ClassVar[Literal["device", "host", "remote"]] = "device"
    batch_size: ClassVar[int] = 8

    def load(self, placement: Placement) -> Weighed:
        return self

    def tiny(self) -> Weighed:
        return self

    def score(self, pixels: Tensor, prompts: Prompts, facts: Sequence[Facts]) -> Tensor:
        return (pixels * shown(self.by)).flatten(1).sum(1) / self.by.numel()


def close(found: Tensor, wanted: Tensor, share: float) -> None:
    """Within a share of what was recorded, by their norms."""
    difference = float((found.detach() - wanted).norm() / wanted.norm())
    assert difference <= share, difference


def test_every_published_tensor_has_its_place() -> None:
    with init_empty_weights():
        net: Any = ClipUnet(**SIZES[VIDEOCRAFTER.hub]["unet"])
        codec: Any = AutoencoderKL(**MODELSCOPE["vae"])
        text: Any = CLIPTextModel(CLIPTextConfig(**MODELSCOPE["text_encoder"]))
    theirs = lvdm.authors(net.state_dict(), net.config)
    assert {key: list(x.shape) for key, x in theirs.items()} == told("lvdm_unet_full_keys.json")
    assert sum(x.numel() for x in theirs.values()) == 1_413_284_420
    ours = {mine: name for name, mine in lvdm.names(list(net.state_dict()), net.config).items()}
    assert {key: ours[key] for key in ours if not key.startswith("fps_")} == told(
        "lvdm_to_diffusers_unet3d_keymap.json"
    )
    shapes = told("lvdm_vae_full_keys.json")
    empty = {key.removeprefix(lvdm.VAE): torch.empty(shape, device="meta") for key, shape in shapes.items()}
    found = {key: x.shape for key, x in lvdm.vae(empty, codec.config).items()}
    assert found == {key: x.shape for key, x in codec.state_dict().items()}
    assert sum(p.numel() for p in text.parameters()) == 340_387_840  # open_clip's but its last layer and projection


def test_the_network_says_what_its_authors_does() -> None:
    golden = load_file(VIDEO / "lvdm_unet_tiny_io.safetensors")
    model = backbone({f"row {i}": golden["context"][i : i + 1] for i in range(2)}, fps=24)
    policy = Policy(model, GaussianProcess(SHRINKING, Ddim(1.0), 25), Full().apply(model, ()))
    cond = policy.embed(("row 0", "row 1"), [{"fps": int(fps)} for fps in golden["fps"]])
    x = golden["x"].transpose(1, 2).clone().requires_grad_(True)
    said = policy.model.predict(x, (golden["timesteps"] + 1) / 1000, cond)
    assert (said.transpose(1, 2) - golden["y"]).abs().max() <= 4e-6
    close(said.transpose(1, 2), golden["y"], 3e-6)
    said.backward(golden["grad_y"].transpose(1, 2))
    assert x.grad is not None
    close(x.grad.transpose(1, 2), golden["grad_x"], 3e-6)
    theirs = lvdm.names(list(model.net.state_dict()), model.net.config)
    weights = dict(model.net.named_parameters())
    recorded = {key.removeprefix("grad."): x for key, x in golden.items() if key.startswith("grad.")}
    assert len(recorded) == 7
    for key, wanted in recorded.items():
        close(weights[theirs[key]].grad, wanted, 6e-6)  # type: ignore[arg-type]


def test_a_speed_is_told_to_all_rows_unless_their_facts_have_another() -> None:
    golden = load_file(VIDEO / "lvdm_unet_tiny_io.safetensors")
    model = backbone({f"row {i}": golden["context"][i : i + 1] for i in range(2)}, fps=16)
    cond = model.embed(("row 0", "row 1"))
    assert cond.tensors["fps"].tolist() == [16, 16]
    with torch.no_grad():
        said = model.predict(golden["x"].transpose(1, 2), (golden["timesteps"] + 1) / 1000, cond)
    close(said.transpose(1, 2), golden["y_fps16_int"], 3e-6)
    for wrong in (0, 2.5, "24"):
        with pytest.raises(ConfigError, match="expected a whole number of frames per second from 1 to 1000"):
            model.embed(("row 0",), [{"fps": wrong}])
    with pytest.raises(ValueError, match="'fps' is 0"):
        Videocrafter(fps=0)


def adapted(tmp_path: Path) -> tuple[Policy[GaussianProcess], dict[str, Tensor], Path]:
    """The recorded policy, guided, with adapters read from a file as VADER publishes them."""
    golden = load_file(VIDEO / "vader_ddim_lora_tiny.safetensors")
    file = tmp_path / "vader.pt"
    torch.save({key.removeprefix("lora."): x for key, x in golden.items() if key.startswith("lora.")}, file)
    model = backbone({"asked": golden["context"], "": golden["uncond_context"]}, fps=int(golden["fps"]))
    weights = Attached(file, Videocrafter.layout).apply(model, ())
    process = GaussianProcess(SHRINKING, Ddim(1.0), 5)
    return Policy(process.guide(model, Guidance(12.0)), process, weights), golden, file


def noise(golden: Mapping[str, Tensor]) -> Recorded:
    return Recorded(0, 0, torch.arange(1), start=golden["x_T"], noises=golden["noises"])


def test_the_sampler_makes_what_vader_makes(tmp_path: Path) -> None:
    policy, golden, _ = adapted(tmp_path)
    levels = SHRINKING.grid(5)
    assert (levels[:-1].flip(0) * 1000 - 1).round().long().tolist() == golden["ddim_timesteps"].tolist()
    made = policy.sample(policy.embed(("asked",)), noise(golden))
    assert len(made.segments) == 5  # the last step takes a chance too
    close(made.final.transpose(1, 2), golden["samples"], 4e-6)
    for segment in made.segments:
        assert torch.equal(policy.decide(made.cond, segment).log_prob(segment.action), segment.log_prob)


def test_the_tables_of_the_sampler_are_vaders() -> None:
    golden = load_file(VIDEO / "vader_ddim_lora_tiny.safetensors")
    levels = SHRINKING.grid(5)
    t, s = levels[:-1].flip(0), levels[1:].flip(0)
    kept = golden["ddim_alphas"]
    torch.testing.assert_close(SHRINKING.alpha(t), kept.sqrt() * golden["ddim_scale_arr"], rtol=1e-6, atol=0)
    torch.testing.assert_close(SHRINKING.sigma(t), (1 - kept).sqrt(), rtol=1e-5, atol=0)
    before = (golden["ddim_alphas_prev"].sqrt() * golden["ddim_scale_arr_prev"]).float()
    torch.testing.assert_close(SHRINKING.alpha(s), before, rtol=1e-6, atol=0)
    nothing = torch.zeros(5, 1)
    step = Ddim(1.0).step(SHRINKING, Stride(nothing, nothing, t, s, 0.0))
    torch.testing.assert_close(step.std, golden["ddim_sigmas"].float(), rtol=1e-5, atol=0)
    for wrong in ({"shrinks": 0.0}, {"shrinks": 1.1}, {"shrinks": 0.7, "prediction": "velocity"}):
        with pytest.raises(ValueError, match="expected shrinks above 0 and up to 1"):
            VariancePreserving(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (RewardGradient(), "last"),
        (RewardGradient(through="specific", step=3), "rand_cut3"),
        (RewardGradient(through="specific", step=0), "rand_cut0"),
    ],
)
def test_adapters_get_the_gradients_vader_gives_them(objective: RewardGradient, name: str, tmp_path: Path) -> None:
    policy, golden, _ = adapted(tmp_path)
    reward: Any = Weighed(golden["reward_w"].transpose(1, 2))
    ctx: Context[Any] = Context(policy, Rubric({"weighed": Graded(reward, reward)}), noise(golden), Alone(), Nothing())
    experience = objective.collect(ctx, PromptBatch(("asked",), ({},)))
    loss = objective.loss(ctx, experience, 0)
    torch.testing.assert_close(loss.metrics["reward"][0], golden["reward"], rtol=1e-5, atol=1e-8)
    loss.rows.sum().backward()
    grads = {key: p.grad for key, p in policy.weights.trainable().items() if p.grad is not None}
    assert len(grads) == len(policy.weights.trainable())
    norm = torch.stack([x.norm() for x in grads.values()]).norm()
    torch.testing.assert_close(norm, golden[f"gradnorm.{name}"], rtol=5e-5, atol=0)
    recorded = {key: x for key, x in golden.items() if key.startswith(f"grad.{name}.")}
    assert len(recorded) == 6
    ours = lvdm.layers([key.partition(".lora_")[0] for key in grads], policy.model.net)
    for key, wanted in recorded.items():
        layer, _, factor = key.removeprefix(f"grad.{name}.base_model.model.").partition(".lora_")
        close(grads[f"{ours[layer]}.lora_{factor.replace('default.', '')}"], wanted, 5e-5)


def test_adapters_are_written_as_they_were_read(tmp_path: Path) -> None:
    policy, _, file = adapted(tmp_path)
    weights = policy.weights
    assert isinstance(weights, LoraWeights) and (weights.config.r, weights.config.lora_alpha) == (4, 8)
    write_authors(weights, Videocrafter.layout, tmp_path / "again.pt")
    before, after = (torch.load(path, weights_only=True) for path in (file, tmp_path / "again.pt"))
    assert before.keys() == after.keys() and all(x.equal(after[key]) for key, x in before.items())


def test_adapters_of_another_alpha_are_scaled_to_the_published_one(tmp_path: Path) -> None:
    policy, _, file = adapted(tmp_path)
    weights = policy.weights
    assert isinstance(weights, LoraWeights)
    weights.config.lora_alpha = 16
    write_authors(weights, Videocrafter.layout, tmp_path / "again.pt")
    before, after = (torch.load(path, weights_only=True) for path in (file, tmp_path / "again.pt"))
    for key, x in before.items():
        assert (2 * x if "lora_B" in key else x).equal(after[key])


def test_vader_adapts_as_many_layers_as_published() -> None:
    with init_empty_weights():
        net: Any = ClipUnet(**SIZES[VIDEOCRAFTER.hub]["unet"])
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    asked = [name for name in names if name.endswith(("to_q", "to_k", "to_v"))]
    assert len(asked) == 198
    modules = dict(net.named_modules())
    assert sum(modules[name].in_features + modules[name].out_features for name in asked) == 313_472
    theirs = lvdm.layers(asked, net)
    layer = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    assert theirs[layer] == "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.mark.usefixtures("small")
def test_a_published_checkpoint_loads_whole(tmp_path: Path) -> None:
    spec = Videocrafter(str(checkpoint(tmp_path / "model.ckpt")), frames=3, height=32, width=32)
    model = spec.load(Placement())
    own = network().state_dict()
    assert all(x.equal(own[key]) for key, x in model.net.state_dict().items())
    golden = load_file(VIDEO / "lvdm_vae_tiny_io.safetensors")
    latents = golden["z"].transpose(1, 2)
    wanted = (golden["decode_first_stage_2DAE"].transpose(1, 2) / 2 + 0.5).clamp(0, 1)
    assert (model.decode(latents) - wanted).abs().max() <= 2e-6
    assert (model.decode(latents, [2, 0]) - wanted[:, [2, 0]]).abs().max() <= 2e-6
    clip = (golden["x"] / 2 + 0.5).expand(3, -1, -1, -1)[None]
    assert (model.encode(clip)[0] - 0.18215 * golden["enc_mean"]).abs().max() <= 2e-6
    folder = replace(spec, weights=str(tmp_path))
    assert folder.load(Placement()).net.state_dict().keys() == own.keys()


@pytest.mark.usefixtures("small")
def test_a_checkpoint_of_deepspeed_loads_too(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model.ckpt", prefix="_forward_module.", wrapper="module")
    model = Videocrafter(str(path), frames=2, height=32, width=32).load(Placement())
    assert all(x.equal(model.net.state_dict()[key]) for key, x in network().state_dict().items())


@pytest.mark.usefixtures("small")
def test_words_are_read_as_open_clip_reads_them(tmp_path: Path) -> None:
    spec = Videocrafter(str(checkpoint(tmp_path / "model.ckpt")), frames=2, height=32, width=32)
    texts = spec.texts(Placement())
    prompts = ("a red fox, running", "", "A  Red fox")
    found = texts(prompts)["words"]
    ids = texts.read.clip.tokens(prompts)["input_ids"]
    assert ids.shape == (3, 77) and ids[1].tolist() == [512, 513] + [0] * 75
    torch.testing.assert_close(found, open_clip(text_tensors(), ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def open_clip(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """All but the last layer of a text encoder as open_clip has it, and its norm: torch's own layers."""
    side, wide = TEXT["hidden_size"], TEXT["intermediate_size"]
    x = weights["token_embedding.weight"][ids] + weights["positional_embedding"]
    mask = nn.Transformer.generate_square_subsequent_mask(77)
    for i in range(TEXT["num_hidden_layers"]):
        layer = nn.TransformerEncoderLayer(side, 2, wide, 0.0, "gelu", batch_first=True, norm_first=True)
        own = lvdm.part(weights, f"transformer.resblocks.{i}.")
        pairs = (("attn.", "self_attn."), ("mlp.c_fc", "linear1"), ("mlp.c_proj", "linear2"), ("ln_", "norm"))
        for theirs, ours in pairs:
            own = {key.replace(theirs, ours): y for key, y in own.items()}
        layer.load_state_dict(own)
        x = layer(x, src_mask=mask)
    return nn.functional.layer_norm(x, (side,), weights["ln_final.weight"], weights["ln_final.bias"])


@pytest.mark.usefixtures("small")
def test_its_network_in_diffusers_layout_replaces_another(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model.ckpt")
    net = network()
    with torch.no_grad():
        net.conv_in.weight.add_(1)
    folder = tmp_path / "adamdad"
    net.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written["fps_cond"] is True
    save_file(lvdm.authors(net.state_dict(), net.config), tmp_path / "theirs.safetensors")
    files = (folder, folder / "diffusion_pytorch_model.safetensors", tmp_path / "theirs.safetensors")
    for unet in files:
        spec = Videocrafter(str(path), str(unet), frames=2, height=32, width=32)
        found = spec.load(Placement()).net.state_dict()
        assert all(x.equal(found[key]) for key, x in net.state_dict().items())


@pytest.mark.usefixtures("small")
def test_what_is_no_checkpoint_of_it_is_refused_in_a_sentence(tmp_path: Path) -> None:
    other = tmp_path / "other.ckpt"
    torch.save({"state_dict": {"model.diffusion_model.a": torch.zeros(1)}}, other)
    with pytest.raises(
        ConfigError, match="no checkpoint of VideoCrafter: nothing in it begins with 'first_stage_model"
    ):
        Videocrafter(str(other)).load(Placement())
    with pytest.raises(
        ConfigError, match=r"are not here; expected a local path, or VideoCrafter/VideoCrafter2/model.ckpt"
    ):
        Videocrafter().load(Placement())
    with pytest.raises(ConfigError, match=r"holds no diffusion_pytorch_model.safetensors"):
        Videocrafter(str(checkpoint(tmp_path / "model.ckpt")), str(tmp_path)).load(Placement())
    assert Videocrafter().sources == (VIDEOCRAFTER, CLIP_WORDS)


def test_only_frames_asked_for_are_decoded_and_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Videocrafter().tiny().load(Placement())
    seen: list[int] = []
    inner = model.codec.net.decode

    def counted(latents: Tensor, return_dict: bool) -> Any:
        seen.append(len(latents))
        return inner(latents, return_dict=return_dict)

    monkeypatch.setattr(model.codec.net, "decode", counted)
    monkeypatch.setattr("tastemaker.models.published.AT_ONCE", 2 * model.shape[2] * model.shape[3])
    x = torch.randn(3, *model.shape)
    whole = model.decode(x)
    assert seen == [2, 2, 2, 2, 1]
    seen.clear()
    assert (model.decode(x, [1]) - whole[:, 1:2]).abs().max() < 1e-5 and seen == [2, 1]


def test_nothing_is_dropped_while_it_trains() -> None:
    model = Videocrafter().tiny().load(Placement())
    cond, x, t = model.embed(("a fox",)), torch.randn(1, *model.shape), torch.tensor([0.5])
    assert model.predict(x, t, cond).equal(model.predict(x, t, cond))
    assert isinstance(unguided(model)[0].embed(("", "b")), Condition)
    assert isinstance(model.codec, Codec)
