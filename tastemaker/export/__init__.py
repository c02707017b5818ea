"""Trained weights in the layouts that others read."""
