"""The NVIDIA plugin."""
