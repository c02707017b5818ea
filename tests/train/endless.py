"""Trains and tells of every saved checkpoint, until it is done or killed."""

import sys
from pathlib import Path

import torch

from tastemaker.config.build import build
from tastemaker.config.load import load
from tastemaker.train import checkpoint
from tastemaker.train.events import Saved, Started
from tastemaker.train.loop import train

torch.set_num_threads(1)
recipe, directory, *overrides = sys.argv[1:]
run = build(load(recipe, overrides), Path(directory))
found = checkpoint.latest(Path(directory))
if found is not None:
    run.resume(found)
for event in train(run):
    if isinstance(event, (Started, Saved)) and run.engine.comm.rank == 0:
        print(event.step, flush=True)
run.engine.close()
