"""What is measured on: the same each time, and like what it stands for."""

from __future__ import annotations

import numpy as np

from app.src.benchmark.workloads import clustered, exact_best, material, overlap, texts


def test_texts_are_the_same_each_time_and_of_three_kinds() -> None:
    short, skewed, long = texts(0.5).values()
    assert texts(0.5) == {"short": short, "skewed": skewed, "long": long}
    assert (len(short), len(skewed), len(long)) == (400, 100, 30)
    lengths = [len(text.split()) for text in skewed]
    assert max(lengths) > 4 * sorted(lengths)[len(lengths) // 2], "a few are much longer than most"
    assert max(map(len, short)) < min(map(len, long))


def test_materials_differ_and_fit_their_columns() -> None:
    rows = [material(number) for number in range(500)]
    assert rows == [material(number) for number in range(500)]
    assert len({row[2:4] for row in rows}) > 490
    for client, number, name, more, kind, *_ in rows:
        assert (len(client), len(number), len(kind) <= 4) == (3, 18, True)
        assert len(name) <= 40
        assert len(more) <= 500


def test_vectors_lie_together_as_those_of_texts() -> None:
    vectors, queries = clustered(384, 20_000, 40)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    scores = np.sort(queries @ vectors.T, axis=1)
    assert 0.3 < np.median(scores[:, -10]) < 0.8
    assert abs(np.median(scores)) < 0.1


def test_the_exact_best_are_exact() -> None:
    vectors, queries = clustered(32, 3_000, 10)
    brute = np.argsort(-(queries.astype(np.float64) @ vectors.astype(np.float64).T), axis=1)[:, :10]
    found = exact_best(vectors, queries, 10)
    assert np.array_equal(found, brute)
    assert overlap(found, brute) == 1.0
