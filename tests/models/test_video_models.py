"""Today's generators of clips beside diffusers' own pipelines, and what all of them owe to those who train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tastemaker.config.load import load
from tastemaker.export import adapters
from tastemaker.guidance import Guided
from tastemaker.lora import Lora, LoraWeights
from tastemaker.models import cogvideox, hunyuanvideo, ltx, mochi, shown, wan
from tastemaker.models.cogvideox import CogVideoX
from tastemaker.models.hunyuanvideo import HunyuanVideo
from tastemaker.models.ltx import Ltx
from tastemaker.models.mochi import Mochi
from tastemaker.models.published import shift, silence
from tastemaker.models.sizes import SIZES
from tastemaker.models.svd import Svd
from tastemaker.models.wan import Wan
from tastemaker.planning.memory import peak
from tastemaker.policy import Backbone, Guidance, Policy
from tastemaker.processes.gaussian import GaussianProcess
from tastemaker.processes.karras import Karras
from tastemaker.processes.paths import Straight, VariancePreserving
from tastemaker.randomness import Randomness
from tastemaker.registry import ConfigError
from tastemaker.types import Placement, index
from tastemaker.weights import Full

PROMPTS = ["a red cat on a mat", "two blue dogs"]


def t5_words() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\N{LOWER ONE EIGHTH BLOCK}", -2.0)]
    return T5Tokenizer(vocab=[*pieces, *((chr(97 + i), -3.0) for i in range(26))], extra_ids=0)


def wan_pipeline(two: bool) -> Any:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    return WanPipeline(
        tokenizer=t5_words(),
        text_encoder=UMT5EncoderModel(UMT5Config(**wan.SMALL["text_encoder"])),
        vae=AutoencoderKLWan(**wan.SMALL["vae"]),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=WanTransformer3DModel(**wan.SMALL["transformer"]),
        transformer_2=WanTransformer3DModel(**wan.SMALL["transformer_2"]) if two else None,
        boundary_ratio=0.875 if two else None,
    )


def cog_pipeline(rotary: bool) -> Any:
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    return CogVideoXPipeline(
        tokenizer=t5_words(),
        text_encoder=T5EncoderModel(T5Config(**cogvideox.SMALL["text_encoder"])),
        vae=AutoencoderKLCogVideoX(**cogvideox.SMALL["vae"], scaling_factor=0.7),
        transformer=CogVideoXTransformer3DModel(
            **{**cogvideox.SMALL["transformer"], "use_rotary_positional_embeddings": rotary}
        ),
        scheduler=CogVideoXDDIMScheduler(
            snr_shift_scale=1.0 if rotary else 3.0,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        ),
    )


def ltx_pipeline() -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    vae = AutoencoderKLLTXVideo(**ltx.SMALL["vae"])
    vae.latents_mean += torch.linspace(-0.5, 0.5, 128)
    vae.latents_std += torch.linspace(0, 0.5, 128)
    return LTXPipeline(
        tokenizer=t5_words(),
        text_encoder=T5EncoderModel(T5Config(**ltx.SMALL["text_encoder"])),
        vae=vae,
        transformer=LTXVideoTransformer3DModel(**ltx.SMALL["transformer"]),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=1024,
            base_shift=0.95,
            max_image_seq_len=4096,
            max_shift=2.05,
            shift_terminal=0.1,
            use_dynamic_shifting=True,
        ),
    )


def clip_words() -> CLIPTokenizer:
    letters = list(bytes_to_unicode().values())
    known = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(known)}, merges=[], model_max_length=77)


def hunyuan_pipeline() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )

    small = hunyuanvideo.SMALL
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(**small["text_encoder"])),
        tokenizer=t5_words(),
        transformer=HunyuanVideoTransformer3DModel(**small["transformer"]),
        vae=AutoencoderKLHunyuanVideo(**small["vae"]),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(CLIPTextConfig(**small["text_encoder_2"])),
        tokenizer_2=clip_words(),
    )


def mochi_pipeline() -> Any:
    from diffusers import (
        AutoencoderKLMochi,
        FlowMatchEulerDiscreteScheduler,
        MochiPipeline,
        MochiTransformer3DModel,
    )

    return MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=AutoencoderKLMochi(**mochi.SMALL["vae"]),
        text_encoder=T5EncoderModel(T5Config(**mochi.SMALL["text_encoder"])),
        tokenizer=t5_words(),
        transformer=MochiTransformer3DModel(**mochi.SMALL["transformer"]),
    )


@dataclass(frozen=True)
class Case:
    """A small pipeline of diffusers, its spec, its process, and what else the pipeline is called with."""

    make: Callable[[], Any]
    spec: Any
    process: GaussianProcess
    guidance: float = 1.0
    asked: dict[str, Any] | None = None
    theirs: Callable[[Tensor], Tensor] = field(default=lambda x: x.transpose(1, 2))  # latents as the pipeline has them


TWICE = Straight(shift=3.0, lowest=0.002994012)  # as diffusers' scheduler, which shifts twice
DARK = VariancePreserving(prediction="velocity", spacing="trailing", ends_clean=True, ends_dark=True, snr_shift=3.0)
CASES = {
    "wan": Case(lambda: wan_pipeline(two=False), Wan().tiny(), GaussianProcess(TWICE, steps=4), 5.0),
    "cogvideox-2b": Case(
        lambda: cog_pipeline(rotary=False),
        CogVideoX().tiny(),
        GaussianProcess(DARK, steps=4),
        6.0,
        theirs=lambda x: x,
    ),
    "cogvideox-5b": Case(
        lambda: cog_pipeline(rotary=True),
        CogVideoX().tiny(),
        GaussianProcess(replace(DARK, snr_shift=1.0), steps=4),
        6.0,
        theirs=lambda x: x,
    ),
    "ltx": Case(
        ltx_pipeline,
        Ltx(rate=24.0).tiny(),
        GaussianProcess(Straight(shift(2, 0.95, 2.05, 1024, 4096), terminal=0.1), steps=4),
        3.0,
        {"frame_rate": 24.0},
        lambda x: x.movedim(2, -1).flatten(1, 3),
    ),
    "hunyuanvideo": Case(
        hunyuan_pipeline,
        replace(HunyuanVideo().tiny(), frames=29, words=512),
        GaussianProcess(Straight(7.0), steps=3),
        asked={"guidance_scale": 6.0},
    ),
    "mochi": Case(mochi_pipeline, Mochi().tiny(), GaussianProcess(Straight(gentle=0.025), steps=4), 4.5),
    "wan22": Case(lambda: wan_pipeline(two=True), Wan(boundary=0.875).tiny(), GaussianProcess(TWICE, steps=4), 4.0),
}


ADAPTED = ("wan", "cogvideox-5b", "ltx", "hunyuanvideo", "mochi")


def pipeline(case: Case, folder: Path) -> Any:
    """Random weights that look at their prompts, in memory and in a folder."""
    with silence(), torch.random.fork_rng():
        torch.manual_seed(0)
        made = case.make()
        for part in ("transformer", "transformer_2", "unet"):
            net = made.components.get(part)
            for number, p in enumerate([] if net is None else net.parameters()):
                p.data.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number + len(part))))
        made.save_pretrained(folder)
        for part in made.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
        made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi's own
@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_the_published_pipeline(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = pipeline(case, tmp_path)
    model: Backbone = replace(case.spec, weights=str(tmp_path)).load(Placement())
    frames, _, height, width = model.pixels
    if case.guidance > 1:
        model = Guided(model, Guidance(case.guidance))
    policy = Policy(model, case.process, Full().apply(model, ()))
    made = policy.sample(policy.embed(PROMPTS), Randomness(0, 0, torch.arange(2)))
    asked = {"height": height, "width": width, "num_frames": frames, "num_inference_steps": case.process.steps}
    asked |= {"guidance_scale": case.guidance, "max_sequence_length": case.spec.words, **(case.asked or {})}
    with silence(), torch.no_grad():
        start = case.theirs(made.start)
        latents = theirs(PROMPTS, latents=start, output_type="latent", **asked).frames
        pixels = theirs(PROMPTS, latents=start, output_type="pt", **asked).frames
    assert (case.theirs(made.final) - latents).abs().max() <= 1e-4
    assert (policy.decode(made.final) - pixels).abs().max() <= 1e-5


LONG: dict[str, tuple[Any, dict[tuple[int, ...], int]]] = {
    # A spec, and by frames how many latents its decoder sees.
    "wan": (replace(Wan().tiny(), frames=13), {(0,): 1, (4,): 2, (5, 0): 3, (12,): 4}),
    "cogvideox": (replace(CogVideoX().tiny(), frames=25), {(0,): 3, (8, 3): 3, (9,): 5, (24,): 7}),
    "ltx": (replace(Ltx().tiny(), frames=17), {(0,): 3, (16, 2): 3}),
    "hunyuanvideo": (replace(HunyuanVideo().tiny(), frames=29), {(0,): 5, (12, 1): 5, (13,): 10, (20,): 5, (28,): 7}),
    "mochi": (replace(Mochi().tiny(), frames=13), {(0,): 1, (6,): 2, (7, 2): 3}),
    "svd": (replace(Svd().tiny(), frames=5, at_once=2), {(0,): 2, (3, 1): 4, (4,): 1}),
}


@pytest.mark.parametrize("name", LONG)
def test_frames_asked_for_are_those_of_the_whole_clip_and_no_more_is_decoded(name: str) -> None:
    spec, asked = LONG[name]
    model = spec.load(Placement())
    vae = model.codec.net
    seen: list[int] = []
    vae.decoder.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[0 if name == "svd" else 2]))
    x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape)
    with torch.no_grad():
        whole = model.decode(x)
        assert whole.shape == (1, *model.pixels)
        for frames, latents in asked.items():
            seen.clear()
            torch.testing.assert_close(model.decode(x, frames), whole[:, list(frames)], rtol=0, atol=2e-6)
            assert sum(seen) == latents, frames


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ("ltx", "mochi", "svd") else []) for name in LONG]
)
def test_frames_send_their_gradient_back_with_and_without_recomputation(name: str) -> None:
    grads = []
    for recompute in (True, False):
        model = replace(LONG[name][0], recompute=recompute).load(Placement())
        x = Randomness(0, 0, torch.arange(1)).normal("x", *model.shape).requires_grad_()
        model.decode(x, [2]).square().sum().backward()
        assert x.grad is not None and bool(x.grad.any())
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_an_autoencoder_that_folds_squares_into_channels_shows_frames_as_published() -> None:
    from diffusers import AutoencoderKLWan

    small = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4, "is_residual": True, "patch_size": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLWan(
            4, 4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, in_channels=12, out_channels=12, **small
        ).eval()
    x = Randomness(0, 0, torch.arange(1)).normal("x", 4, 3, 2, 2)
    with torch.no_grad():
        whole = vae.decode(x, return_dict=False)[0]
        assert torch.equal(shown.wan(vae, recompute=False)(x, range(9)), whole)
        some = shown.wan(vae, recompute=True)(x, [4, 1])
        torch.testing.assert_close(some, whole[:, :, [4, 1]], rtol=0, atol=2e-6)


def test_each_expert_sees_the_rows_of_its_own_levels() -> None:
    model = Wan(boundary=0.875).tiny().load(Placement())
    experts: Any = model.net
    for number, p in enumerate(experts.low.parameters()):
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    x, t = Randomness(0, 0, torch.arange(4)).normal("x", *model.shape), torch.tensor([0.9, 0.2, 0.875, 0.8])
    cond = model.embed(["a", "b", "c", "d"])
    together = model.predict(x, t, cond)
    for expert, rows in ((experts.high, [0, 2]), (experts.low, [1, 3])):
        model.net = expert
        alone = model.predict(x[rows], t[rows], index(cond, torch.tensor(rows)))
        torch.testing.assert_close(together[rows], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LONG)
def test_adapters_go_onto_attention_unless_asked_for_elsewhere(name: str) -> None:
    ends = ("to_q", "to_k", "to_v", "to_out.0")
    found = Lora(rank=2).apply(LONG[name][0].load(Placement()), ()).trainable()
    assert found and all(key.partition(".lora_")[0].endswith(ends) for key in found)
    more = Lora(rank=2, targets="all-linear").apply(LONG[name][0].load(Placement()), ()).trainable()
    assert len(more) > len(found)


def test_latents_of_clips_are_the_published_ones() -> None:
    model = Wan().tiny().load(Placement())
    pixels = torch.rand(1, *model.pixels, generator=torch.Generator().manual_seed(0))
    vae = model.codec.net
    with torch.no_grad():
        raw = vae.encode(2 * pixels.transpose(1, 2) - 1).latent_dist.mode()
    mean, std = (torch.tensor(vae.config[key]).view(-1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    torch.testing.assert_close(model.encode(pixels), ((raw - mean) / std).transpose(1, 2))


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'frames' is 80; expected one more than a multiple of 4, such as 81"):
        Wan(frames=80)
    with pytest.raises(ValueError, match="'width' is 700; expected a multiple of 32"):
        Ltx(width=700)
    with pytest.raises(ValueError, match=r"'rate' is 0\.0; expected frames a second"):
        Ltx(rate=0.0)
    with pytest.raises(ConfigError, match="are not here; expected a local path, or Wan-AI/Wan2"):
        Wan().load(Placement())
    with pytest.raises(
        ConfigError, match=r"the clips are 1 frames of 32x32 and the model makes 5 of 32x32; set data\.size"
    ):
        Wan().tiny().load(Placement()).encode(torch.zeros(1, 1, 3, 32, 32))
    with pytest.raises(ValueError, match="a prompt has no fact 'image', but others have; give a path or pixels"):
        Svd().tiny().load(Placement()).embed(["", ""], [{"image": torch.zeros(1, 3, 32, 32)}, {}])
    for facts in ((), ({}, {})):
        with pytest.raises(ConfigError, match=r"found no picture for a prompt; set model\.image, or give each"):
            Svd().tiny().load(Placement()).embed(["", ""], facts)
    with pytest.raises(ValueError, match="'ends_dark' with prediction 'epsilon' leaves nothing to predict"):
        VariancePreserving(ends_dark=True)
    with pytest.raises(ValueError, match="expected 0 < smallest < largest <= 700"):
        Karras(largest=1e4)
    pipeline(CASES["wan22"], tmp_path)
    with pytest.raises(
        ConfigError, match=r"holds two transformers, expected the level they meet at; set model\.boundary"
    ):
        replace(Wan().tiny(), weights=str(tmp_path)).load(Placement())


def test_levels_are_those_of_the_published_schedulers() -> None:
    dark = cog_pipeline(rotary=False).scheduler
    kept = DARK.alpha(torch.arange(1, 1001) / 1000) ** 2
    torch.testing.assert_close(kept, dark.alphas_cumprod.float(), rtol=1e-5, atol=1e-9)
    assert all(Straight(gentle=0.025).grid(steps)[-1] == 0 for steps in (1, 10, 25))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("wan", "ltx") else [pytest.mark.slow]) for name in ADAPTED]
)
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_adapters_are_read_by_the_published_pipeline(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs = pipeline(case, tmp_path)
    spec = replace(case.spec, weights=str(tmp_path))
    model = spec.load(Placement())
    weights = Lora(rank=2).apply(model, ())
    assert isinstance(weights, LoraWeights)
    for number, p in enumerate(weights.trainable().values()):
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    adapters.write_diffusers(weights, spec.layout, tmp_path / adapters.FILE, torch.float32)
    policy = Policy(model, case.process, weights)
    made = policy.sample(policy.embed(PROMPTS), Randomness(0, 0, torch.arange(2)))
    frames, _, height, width = model.pixels
    asked = {"height": height, "width": width, "num_frames": frames, "num_inference_steps": case.process.steps}
    asked |= {"guidance_scale": 1.0, "max_sequence_length": case.spec.words, **(case.asked or {})}
    with silence(), torch.no_grad():
        start, kind = case.theirs(made.start), {"output_type": "latent"}
        before = theirs(PROMPTS, latents=start, **kind, **asked).frames
        theirs.load_lora_weights(tmp_path, weight_name=adapters.FILE)
        after = theirs(PROMPTS, latents=start, **kind, **asked).frames
    assert (case.theirs(made.final) - after).abs().max() <= 1e-4
    assert (before - after).abs().max() > 1e-2


@pytest.mark.slow
def test_wan_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, Wan.weights, {"transformer": wan.SMALL["transformer"], "vae": wan.SMALL["vae"]})
    asked = ["model.height=64", "model.width=64"]
    short, long = (peak(load("vader-wan-hps", [*asked, f"model.frames={frames}"])) for frames in (5, 33))
    assert 0 < short.training < long.training
    assert short.weights == long.weights


def test_wan_refuses_an_autoencoder_of_another_of_its_sizes() -> None:
    asked = replace(Wan().tiny(), height=64, width=64, channels=48, factor=16)
    with pytest.raises(ConfigError, match=r"has 16 channels and factor 8, found 48 and 16; set model.channels=16"):
        asked.load(Placement())
