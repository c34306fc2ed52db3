"""Include root of humming's device code; holds `.cuh` files only."""
