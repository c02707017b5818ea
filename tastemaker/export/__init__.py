"""Export of trained weights to the layouts that other programs load."""
