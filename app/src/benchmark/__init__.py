"""Benchmarks: `owl-sap benchmark` and the programs under benchmarks/. `harness` measures and reports."""
