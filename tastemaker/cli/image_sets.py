"""Commands about sets of pictures: pack, reference, compare and reconstruct."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .options import Device, stderr_console

app = typer.Typer()


class FeatureNetwork(StrEnum):
    inception = "inception"
    classifier = "classifier"


FeatureNetworkOption = Annotated[
    FeatureNetwork, typer.Option(help="Who looks: FID's Inception, or the classifier of small photographs.")
]
FeatureWeightsOption = Annotated[str, typer.Option(help="Its file.")]
FeatureDeviceOption = Annotated[Device, typer.Option(help="Where it runs.")]


@app.command()
def pack(
    pictures: Annotated[Path, typer.Argument(help="A folder of pictures of one size.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("samples.npz"),
) -> None:
    """Pack a folder of samples into one `.npz` in the layout of ADM's evaluator."""
    from ..evaluation import image_sets

    image_sets.pack_images(pictures, out, stderr_console())


@app.command()
def reference(
    pictures: Annotated[Path, typer.Argument(help="Real ones: a folder, CIFAR-10's, an .npz, or ADM's reference.")],
    weights: FeatureWeightsOption,
    name: Annotated[str, typer.Option(help="What they are, such as cifar10.")],
    split: Annotated[str, typer.Option(help="Which of them, such as train.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("reference.safetensors"),
    limit: Annotated[int, typer.Option(min=0, help="Only so many, at random; all if 0.")] = 0,
    count: Annotated[int, typer.Option(min=0, help="Of how many the statistics in ADM's reference are.")] = 0,
    network: FeatureNetworkOption = FeatureNetwork.inception,
    device: FeatureDeviceOption = Device.auto,
) -> None:
    """Compute reference features of real images, for `tastemaker compare`."""
    from ..evaluation import image_sets
    from ..evaluation.reference_statistics import load_feature_extractor
    from ..training import placement

    by = load_feature_extractor(network.value, weights, placement.choose_placement(device.value, "fp32"))
    image_sets.make_reference(
        pictures, image_sets.ReferenceDescription(name, split, limit, count), by, out, stderr_console()
    )


@app.command()
def compare(
    samples: Annotated[Path, typer.Argument(help="An .npz, or a folder of pictures.")],
    reference: Annotated[Path, typer.Option(help="What `tastemaker reference` wrote.")],
    weights: FeatureWeightsOption,
    name: Annotated[str, typer.Option(help="What the reference must be.")] = "",
    split: Annotated[str, typer.Option(help="Which split it must be of.")] = "",
    count: Annotated[int, typer.Option(min=0, help="Of how many pictures it must be.")] = 0,
    network: FeatureNetworkOption = FeatureNetwork.inception,
    few: Annotated[bool, typer.Option("--few", help="Although there are fewer samples than features.")] = False,
    out: Annotated[Path | None, typer.Option(help="A .json file for the numbers.")] = None,
    device: FeatureDeviceOption = Device.auto,
) -> None:
    """Compute FID, KID, precision, recall and, if the network has classes, the Inception score of samples."""
    from ..evaluation import image_sets
    from ..evaluation.reference_statistics import load_feature_extractor
    from ..training import placement

    by = load_feature_extractor(network.value, weights, placement.choose_placement(device.value, "fp32"))
    claim = image_sets.ExpectedReference(name, split, count)
    image_sets.write_metrics(
        image_sets.compare_to_reference(samples, reference, claim, by, stderr_console(), few=few), out
    )


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
    device: FeatureDeviceOption = Device.auto,
) -> None:
    """Reconstruct images with an autoencoder; writes PSNR, SSIM and LPIPS of each. Resumes if interrupted."""
    from ..autoencoders.lpips import VGG16
    from ..evaluation import reconstruction
    from ..training import placement

    order = reconstruction.ReconstructionOptions(pictures, model, out, size, rows, skip, vgg or VGG16.hub, heads)
    reconstruction.reconstruct_images(order, placement.choose_placement(device.value, "fp32"), stderr_console())
