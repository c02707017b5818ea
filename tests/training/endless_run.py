"""Train and print the step of every saved checkpoint, until the run is finished or killed."""

import sys
from pathlib import Path

import torch

from tastemaker.config.build import build, build_autoencoder, make_tiny_any
from tastemaker.config.load import load_any_config
from tastemaker.config.schema import AutoencoderRunConfig
from tastemaker.training import checkpoint
from tastemaker.training.events import CheckpointSaved, TrainingStarted
from tastemaker.training.trainer import training_events

torch.set_num_threads(1)
recipe, directory, *overrides = sys.argv[1:]
config = load_any_config(recipe, overrides)
if isinstance(config, AutoencoderRunConfig):
    run = build_autoencoder(make_tiny_any(config), Path(directory))
else:
    run = build(config, Path(directory))
latest = checkpoint.latest_checkpoint(Path(directory))
if latest is not None:
    run.resume(latest)
for event in training_events(run):
    if isinstance(event, (TrainingStarted, CheckpointSaved)) and run.engine.comm.rank == 0:
        print(event.step, flush=True)
run.engine.close()
