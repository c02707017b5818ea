"""Commands about sets of pictures: pack, reference, compare and reconstruct."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .options import Device, console

app = typer.Typer()


class Network(StrEnum):
    inception = "inception"
    classifier = "classifier"


By = Annotated[Network, typer.Option(help="Who looks: FID's Inception, or the classifier of small photographs.")]
Weights = Annotated[str, typer.Option(help="Its file.")]
Spot = Annotated[Device, typer.Option(help="Where it runs.")]


@app.command()
def pack(
    pictures: Annotated[Path, typer.Argument(help="A folder of pictures of one size.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("samples.npz"),
) -> None:
    """Put samples into one `.npz`, as ADM's evaluator and others exchange them."""
    from ..commands import comparing

    comparing.pack(pictures, out, console())


@app.command()
def reference(
    pictures: Annotated[Path, typer.Argument(help="Real ones: a folder, CIFAR-10's, an .npz, or ADM's reference.")],
    weights: Weights,
    name: Annotated[str, typer.Option(help="What they are, such as cifar10.")],
    split: Annotated[str, typer.Option(help="Which of them, such as train.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("reference.safetensors"),
    limit: Annotated[int, typer.Option(min=0, help="Only so many, at random; all if 0.")] = 0,
    count: Annotated[int, typer.Option(min=0, help="Of how many the statistics in ADM's reference are.")] = 0,
    network: By = Network.inception,
    device: Spot = Device.auto,
) -> None:
    """Keep what a network sees of real pictures, with what they are, for samples to be compared with."""
    from ..commands import comparing, placing
    from ..eval.reference import eye

    by = eye(network.value, weights, placing.placement(device.value, "fp32"))
    comparing.make(pictures, comparing.Named(name, split, limit, count), by, out, console())


@app.command()
def compare(
    samples: Annotated[Path, typer.Argument(help="An .npz, or a folder of pictures.")],
    reference: Annotated[Path, typer.Option(help="What `tastemaker reference` wrote.")],
    weights: Weights,
    name: Annotated[str, typer.Option(help="What the reference must be.")] = "",
    split: Annotated[str, typer.Option(help="Which split it must be of.")] = "",
    count: Annotated[int, typer.Option(min=0, help="Of how many pictures it must be.")] = 0,
    network: By = Network.inception,
    few: Annotated[bool, typer.Option("--few", help="Although there are fewer samples than features.")] = False,
    out: Annotated[Path | None, typer.Option(help="A .json file for the numbers.")] = None,
    device: Spot = Device.auto,
) -> None:
    """FID, KID, precision, recall and, where the network knows classes, the Inception score of samples."""
    from ..commands import comparing, placing
    from ..eval.reference import eye

    by = eye(network.value, weights, placing.placement(device.value, "fp32"))
    claim = comparing.Claim(name, split, count)
    comparing.write(comparing.compare(samples, reference, claim, by, console(), few=few), out)


@app.command()
def reconstruct(
    pictures: Annotated[Path, typer.Argument(help="A folder of pictures, at any depth.")],
    model: Annotated[str, typer.Option("--model", "-m", help="An autoencoder: a run, a file, a folder, or a YAML.")],
    out: Annotated[Path, typer.Option(help="The folder to write to, or to go on in.")] = Path("reconstructed"),
    size: Annotated[int, typer.Option(min=0, help="Of a square from the middle; pictures as they are if 0.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Pictures of one size at a time.")] = 16,
    skip: Annotated[int, typer.Option(min=0, help="Files that may be broken; one more ends it.")] = 10,
    vgg: Annotated[str, typer.Option(help="VGG16, for LPIPS; the hub's, if it was fetched.")] = "",
    heads: Annotated[str, typer.Option(help="LPIPS' heads; those of the package lpips, if it is there.")] = "",
    device: Spot = Device.auto,
) -> None:
    """Write pictures beside their copies by an autoencoder, and PSNR, SSIM and LPIPS of each; run again, it goes on."""
    from ..commands import placing, reconstructing
    from ..perceptual import VGG16

    order = reconstructing.Order(pictures, model, out, size, rows, skip, vgg or VGG16.hub, heads)
    reconstructing.reconstruct(order, placing.placement(device.value, "fp32"), console())
