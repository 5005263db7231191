"""The experiments of free-energy-mixer: the paper's tables, ablations, benchmarks and what goes beyond them."""
