"""What a commit adds to each call. Written anew for each commit; here nothing is added."""

NAMES: tuple[str, ...] = ("python", "gemm", "memory", "step", "decode", "loader")
ITERATIONS: dict[str, int] = {}
SLEEP_SECONDS: dict[str, float] = {}
