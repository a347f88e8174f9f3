"""How fast and how sound is our engine on a CUDA card? `scripts/gpu-proof --help` says what it measures and how."""
