"""Benchmarks: `owl-sap benchmark` and the programs under benchmarks/. `harness` measures in turns and reports."""
