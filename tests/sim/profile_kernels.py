"""Where the time goes when a composed kernel is simulated.

    python tests/sim/profile_kernels.py [DEVICE [PROBLEM [M N K]]]

It runs the kernel twice, because the first run decodes it, and profiles the second one.
"""

import cProfile
import pstats
import sys
import time

from test_kernels import Product


def main() -> None:
    """Runs and prints the profile, costliest functions first."""
    given = [*sys.argv[1:], *("a100", "int4_g128 x fp16", "128", "128", "256")[len(sys.argv) - 1 :]]
    device, problem = given[:2]
    m, n, k = map(int, given[2:5])
    product = Product(problem, device, m, n, k)
    launch = product.prepare()
    for name in ("with decoding", "without"):
        start = time.process_time()
        launch()
        print(f"{name}: {time.process_time() - start:.3f} s of processor time")
    profile = cProfile.Profile()
    profile.runcall(launch)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
