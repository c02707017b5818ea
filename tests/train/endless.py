"""Trains and tells of every saved checkpoint, until it is done or killed."""

import sys
from pathlib import Path

import torch

from tastemaker.commands.training import events
from tastemaker.config.build import build, build_autoencoder, shrunk_any
from tastemaker.config.load import load_any
from tastemaker.config.run import AutoencoderConfig
from tastemaker.train import checkpoint
from tastemaker.train.events import Saved, Started

torch.set_num_threads(1)
recipe, directory, *overrides = sys.argv[1:]
config = load_any(recipe, overrides)
if isinstance(config, AutoencoderConfig):
    run = build_autoencoder(shrunk_any(config), Path(directory))
else:
    run = build(config, Path(directory))
found = checkpoint.latest(Path(directory))
if found is not None:
    run.resume(found)
for event in events(run):
    if isinstance(event, (Started, Saved)) and run.engine.comm.rank == 0:
        print(event.step, flush=True)
run.engine.close()
