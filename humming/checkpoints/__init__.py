"""Checkpoints that others quantized, read as they are: nothing is quantized a second time."""
