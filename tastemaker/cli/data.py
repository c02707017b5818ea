"""Commands that prepare training data: embed, encode and rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..core.registry import ConfigError
from .options import (
    DATA,
    Device,
    Overrides,
    Precision,
    PromptFileOption,
    RunDeviceOption,
    Tiny,
    merge_overrides,
    print_next_steps,
    stderr_console,
)

app = typer.Typer()


@app.command(rich_help_panel=DATA, epilog="Example: tastemaker embed flux --prompts prompts.txt --out embeddings")
def embed(
    model: Annotated[str, typer.Argument(help="A recipe, or a published model such as flux.")],
    overrides: Overrides = None,
    prompts: PromptFileOption = None,
    out: Annotated[Path, typer.Option(help="Output folder; resumes if it exists.")] = Path("embeddings"),
    embedding_format: Annotated[
        str, typer.Option("--format", help="tastemaker, or srpo (for SRPO and DanceGRPO).")
    ] = "tastemaker",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts.")] = None,
    shard_mb: Annotated[int, typer.Option(min=1, help="Size of a file in MB.")] = 512,
    tiny: Tiny = False,
    device: Annotated[Device, typer.Option(help="Device of the text encoders.")] = "auto",
    precision: Annotated[Precision, typer.Option(help="Precision of the text encoders.")] = "bf16",
) -> None:
    """Precompute the text embeddings of prompts, so that training needs no text encoder. Resumes if interrupted."""
    from ..config.registries import MODELS as MODEL_REGISTRY
    from ..data import embedding_precompute
    from ..training.precision import choose_placement

    options = embedding_precompute.EmbedOptions(
        model, overrides or (), prompts, out, embedding_format, limit, shard_mb * 2**20
    )
    embedding_precompute.embed_prompts(
        options, choose_placement(device, precision), tiny=tiny, console=stderr_console()
    )
    recipe = "RECIPE" if "/" in model or model in MODEL_REGISTRY else model
    print_next_steps(f"tastemaker train {recipe} model.embeddings={out}")


@app.command(rich_help_panel=DATA, epilog="Example: tastemaker encode images --vae runs/vae-playground --size 64")
def encode(
    images: Annotated[Path, typer.Argument(help="Folder of images, with a subfolder per class or not, or CIFAR-10.")],
    tokenizer: Annotated[str, typer.Option(help="Tokenizer: a run, a file, or a name such as vq_ds16_c2i.")] = "",
    vae: Annotated[str, typer.Option(help="VAE, for latents: a run, a file, or a diffusers folder.")] = "",
    size: Annotated[int, typer.Option(min=1, help="Image size in pixels.")] = 256,
    out: Annotated[Path | None, typer.Option(help="Output folder; resumes if it exists.")] = None,
    views: Annotated[
        Literal["center", "flip", "ten-crop"] | None,
        typer.Option(help="Crops of each image: center (default for latents), flip (default for tokens), or ten-crop."),
    ] = None,
    crop_range: Annotated[float, typer.Option(min=1, max=4, help="Resize factor before ten-crop.")] = 1.1,
    name: Annotated[str, typer.Option(help="Name of the dataset in the folder names.")] = "imagenet",
    split: Annotated[str, typer.Option(help="Split of CIFAR-10: train or test.")] = "train",
    caption_source: Annotated[
        Literal["caption", "class_name", "class_id", "empty"] | None,
        typer.Option(help="With --vae: source of captions; default: the caption, else the class."),
    ] = None,
    shard_size: Annotated[int, typer.Option(min=1, help="With --vae: images per shard.")] = 1024,
    max_skipped: Annotated[int, typer.Option(min=0, help="Broken images to skip per rank before stopping.")] = 10,
    device: Annotated[Device, typer.Option(help="Device.")] = "auto",
) -> None:
    """Encode images to tokens or latents. Resumes if interrupted; runs on several GPUs under torchrun."""
    from ..data import image_encoding
    from ..training.precision import choose_placement

    place = choose_placement(device, "fp32")
    if bool(tokenizer) == bool(vae):
        raise ConfigError(
            "encode: expected either --tokenizer (writes tokens) or --vae (writes latents); give exactly one of the "
            "two [TM069]"
        )
    if vae:
        if views == "ten-crop":
            raise ConfigError(
                "encode: --views ten-crop works with --tokenizer only; use --views center or --views flip with --vae "
                "[TM070]"
            )
        options = image_encoding.LatentEncodingOptions(
            images, vae, out or Path("latents"), size, views == "flip", caption_source, shard_size, max_skipped
        )
        image_encoding.encode_latents(options, place, stderr_console())
        print_next_steps(f"tastemaker train dit-folder 'data={{type: latent_folder, path: {options.out}}}'")
    else:
        target = out or Path("codes")
        token_options = image_encoding.TokenEncodingOptions(
            images, tokenizer, target, size, views or "flip", crop_range, name, split, max_skipped
        )
        image_encoding.encode_tokens(token_options, place, stderr_console())
        print_next_steps(f"tastemaker train llamagen-pretrain 'data={{type: token_folder, path: {target}}}'")


@app.command(rich_help_panel=DATA, epilog="Example: tastemaker rank grpo-playground-flow --limit 100 --out ranked")
def rank(
    recipe: Annotated[str, typer.Argument(help="A recipe, the directory of a run, or an export.")],
    overrides: Overrides = None,
    prompts: PromptFileOption = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of prompts; 0: all.")] = 0,
    count: Annotated[int, typer.Option(min=2, help="Samples per prompt.")] = 20,
    labeler: Annotated[str, typer.Option(help="Labeler: playground, geneval, or a reward such as '{type: vlm}'.")] = (
        "playground"
    ),
    exclude: Annotated[
        list[str] | None, typer.Option(help="Benchmark or prompt file whose prompts are excluded; repeatable.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Minimum score of a correct sample.")] = 0.5,
    margin: Annotated[float | None, typer.Option(help="Minimum score difference of a pair.")] = None,
    pairs_per_prompt: Annotated[int, typer.Option(min=1, help="Maximum number of pairs per prompt.")] = 1,
    previews: Annotated[str, typer.Option(help="Progress values of previews for PARM; empty: none.")] = (
        "0.25,0.5,0.7,0.9"
    ),
    unclear_until: Annotated[float, typer.Option(help="Progress up to which previews are labeled unclear.")] = 0.55,
    clear_from: Annotated[float, typer.Option(help="Progress from which previews are labeled clear.")] = 0.62,
    weights: Annotated[str, typer.Option(help="Weights: live, or a snapshot such as ema.")] = "live",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Output folder; resumes if it exists.")] = Path("ranked"),
    tiny: Tiny = False,
    device: RunDeviceOption = None,
) -> None:
    """Sample prompts, label the samples and write DPO pairs and judge training sets. Resumes if interrupted."""
    from ..data import preference_labels
    from ..search import generation

    config, checkpoint = generation.resolve_source(
        recipe, merge_overrides(overrides, device), tiny=tiny, console=stderr_console()
    )
    batch, dropped = preference_labels.select_prompts(prompts, config, limit, exclude or ())
    if dropped:
        stderr_console().print(
            f"{len(dropped)} prompts left out, such as '{dropped[0]:.80}'", markup=False, highlight=False
        )
    rules = preference_labels.LabelRules(threshold, margin, pairs_per_prompt, unclear_until, clear_from)
    progress = preference_labels.parse_progress(previews, "--previews")
    options = preference_labels.PreferenceOptions(batch, count, labeler, out, seed, weights, progress, rules)
    preference_labels.label_preferences(config, checkpoint, options, tiny=tiny, console=stderr_console())
    print_next_steps(
        f"tastemaker train DPO_RECIPE 'data={{type: pair_file, path: {out / preference_labels.PAIRS}}}'",
        f"tastemaker train orm-onevision 'data={{type: vqa_file, path: {out / preference_labels.ORM}}}'",
    )
