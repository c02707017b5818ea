"""One thread a process: tests run beside each other, and small matrices gain nothing from more."""

import torch

torch.set_num_threads(1)
