"""What tests of device plugins use; `humming.testing.conformance` is the suite for them."""
