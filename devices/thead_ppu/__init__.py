"""The T-Head PPU plugin."""
