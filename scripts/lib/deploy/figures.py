"""Print two lines from the report of `t4_gpu_optimizer --json` on stdin. Standard library only."""

import json
import sys
from typing import Any


def fastest(rows: list[dict[str, Any]], figure: str) -> dict[str, Any] | None:
    return max((row for row in rows if row.get(figure) is not None), key=lambda row: row[figure], default=None)


def lines(report: dict[str, Any]) -> list[str]:
    device = report["device"]
    product = fastest(report["matmul"], "tflops")
    embedding = fastest(report["embedding"], "tokens_per_second")
    matrix = f"{product['dtype']} products {product['tflops']:.1f} TFLOP/s" if product else "no product measured"
    texts = "no text embedded"
    if embedding:
        texts = (
            f"{embedding['precision']} embedding {embedding['texts_per_second']:,.0f} texts/s, "
            f"{embedding['tokens_per_second']:,.0f} tokens/s"
        )
    warning = "" if device["kind"] == "cuda" else "  THE CONTAINER COMPUTES ON THE CPU"
    return [f"measured: {device['name']}: {matrix}{warning}", f"measured: {texts}"]


if __name__ == "__main__":
    for line in lines(json.load(sys.stdin)):
        sys.stdout.write(line + "\n")
