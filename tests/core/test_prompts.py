"""Prompts of queries and documents: those of sentence-transformers, outside all counts and limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.src.core.backends import InputType, ModelUnsupported
from app.src.core.backends.folder import read_folder
from app.src.core.backends.hashing import HashingBackend
from app.src.core.engine import EmbeddingEngine, Engine
from app.src.core.loading import EngineOptions, load_engine
from tests.core.conftest import ScriptedBackend

MakeFolder = Callable[..., Path]
LONG = " ".join(f"pump {number}" for number in range(60))  # above the tiny model's 48 tokens
TEXTS = ["oil pump", "  Öl für Grüße 🚀", "", "ﬁlter", "[SEP] x", LONG, "é́ combining", "泵"]
E5 = {"query": "query: ", "document": "passage: "}


def write_prompts(folder: Path, prompts: Any, default: str | None = None) -> Path:
    content = {"prompts": prompts, "default_prompt_name": default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(content))
    return folder


def with_unigram_tokenizer(folder: Path) -> Path:
    """Replace the tokenizer by a small Unigram one, with the steps of XLM-RoBERTa's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    pieces = ["▁", "▁query", "▁passage", ":", "▁oil", "▁pump", "▁P", "ump", "ü", "ö", "▁Gr", "ße", "e", "r", "🚀"]
    vocabulary = [(token, 0.0) for token in ("<pad>", "<unk>", "<s>", "</s>")]
    vocabulary += [(piece, -1.0 - place / 10) for place, piece in enumerate(pieces)]
    vocabulary += [(chr(letter), -9.0) for letter in range(33, 127) if chr(letter) not in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=1))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    (folder / "vocab.txt").unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 48} | special
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


def engine_of(folder: Path, **options: Any) -> Engine:
    return load_engine(EngineOptions(str(folder), device="cpu", precision="fp32", **options))


@pytest.fixture(scope="module")
def reference() -> Callable[[Path], Any]:
    def load(folder: Path) -> Any:
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device="cpu")

    return load


@pytest.mark.parametrize("unigram", [False, True])
@pytest.mark.parametrize(
    ("prompts", "default"),
    [
        (E5, None),
        (E5, "query"),
        ({"query": "Represent this: "}, "query"),
        pytest.param({"query": "no blank", "document": "ﬁ"}, None, marks=pytest.mark.slow),
        pytest.param({"classification": "Classify: "} | E5, "classification", marks=pytest.mark.slow),
        pytest.param({"document": "title: none | text: "}, None, marks=pytest.mark.slow),
        pytest.param({}, None, marks=pytest.mark.slow),
    ],
)
def test_the_vectors_are_those_of_encode_query_and_encode_document(
    make_folder: MakeFolder, reference: Callable[[Path], Any], prompts: Any, default: str | None, unigram: bool
) -> None:
    folder = write_prompts(make_folder(), prompts, default)
    if unigram:
        with_unigram_tokenizer(folder)
    peer = reference(folder)
    with engine_of(folder) as engine:
        encodes: dict[InputType, Any] = {"query": peer.encode_query, "document": peer.encode_document}
        for input_type, encode in encodes.items():
            wanted = encode(TEXTS, normalize_embeddings=True)
            np.testing.assert_allclose(engine.embed(TEXTS, input_type=input_type), wanted, atol=2e-6)
            np.testing.assert_allclose(engine.submit(TEXTS, input_type=input_type).result(), wanted, atol=2e-6)
        np.testing.assert_array_equal(engine.embed(TEXTS), engine.embed(TEXTS, input_type="document"))


@pytest.mark.parametrize("role", ["passage", "corpus"])
def test_the_prompt_of_documents_may_have_an_older_name(
    make_folder: MakeFolder, reference: Callable[[Path], Any], role: str
) -> None:
    """sentence-transformers 6 saves an empty "document" beside it."""
    folder = write_prompts(make_folder(), {"query": "query: ", role: "passage: ", "document": ""})
    with engine_of(folder) as engine:
        wanted = reference(folder).encode(TEXTS, prompt_name=role, normalize_embeddings=True)
        np.testing.assert_allclose(engine.embed(TEXTS), wanted, atol=2e-6)


def test_given_prompts_replace_those_of_the_folder(make_folder: MakeFolder) -> None:
    folder = write_prompts(make_folder(), E5)
    with engine_of(folder) as own, engine_of(folder, query_prompt="", document_prompt="text: ") as given:
        assert not np.allclose(own.embed(["oil"], input_type="query"), given.embed(["oil"], input_type="query"))
        with engine_of(write_prompts(folder, {})) as plain:
            np.testing.assert_allclose(given.embed(["oil"]), plain.embed(["text: oil"]), atol=1e-6)
            np.testing.assert_array_equal(given.embed(["oil"], input_type="query"), plain.embed(["oil"]))


@pytest.mark.parametrize(
    ("prompts", "default", "words"),
    [
        ({"search": "s: "}, "search", "one prompt for all texts, 'search'.*set .embedding. query_prompt"),
        ({"query": 3}, None, "must be texts by name"),
        (["query: "], None, "must be texts by name"),
    ],
)
def test_prompts_of_no_known_role_are_refused(
    make_folder: MakeFolder, prompts: Any, default: str | None, words: str
) -> None:
    folder = write_prompts(make_folder(), prompts, default)
    with pytest.raises(ModelUnsupported, match=words):
        read_folder(folder, "tiny")


def test_a_default_prompt_is_no_obstacle_when_the_settings_give_prompts(make_folder: MakeFolder) -> None:
    folder = write_prompts(make_folder(), {"search": "s: "}, "search")
    read = read_folder(folder, "tiny", "s: ")
    assert (read.query_prompt, read.document_prompt) == ("s: ", "")


@pytest.mark.parametrize("stack", [("Transformer", "Pooling"), ("Transformer", "Pooling", "Dense", "Normalize")])
def test_pooling_without_the_prompt_is_refused(make_folder: MakeFolder, stack: tuple[str, ...]) -> None:
    folder = make_folder(stack=stack)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    assert read_folder(folder, "tiny").query_prompt == "", "without a prompt it changes nothing"
    write_prompts(folder, E5)
    with pytest.raises(ModelUnsupported, match="leaves its prompts out of the pooling"):
        read_folder(folder, "tiny")
    assert read_folder(folder, "tiny", "", "").query_prompt == ""


# ------------------------------------------------------------------------------------------------------ counts, limits


@pytest.fixture(scope="module", params=["wordpiece", "unigram"])
def prompted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from app.src.core.backends.folder import find_folder
    from tests.core.conftest import make_tiny_folder

    folder = make_tiny_folder(tmp_path_factory.mktemp(request.param), find_folder("all-MiniLM-L6-v2"))
    write_prompts(folder, E5)
    if request.param == "unigram":
        with_unigram_tokenizer(folder)
    with engine_of(folder) as engine:
        yield engine


texts = st.lists(
    st.text(st.sampled_from(" \t\n äöüßéA1:.-́🚀泵\ud83d") | st.characters(), max_size=40)
    | st.sampled_from(["", " ", "query: ", "  Grüße", "[SEP]", "</s>", LONG]),
    min_size=1,
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(some=texts, input_type=st.sampled_from(["query", "document"]))
def test_counts_are_those_of_the_bare_texts(prompted: EmbeddingEngine, some: list[str], input_type: InputType) -> None:
    wanted = prompted.count_tokens(some)
    reported: list[int] = []
    assert prompted.embed_counted(some, input_type=input_type)[1] == wanted
    prompted.submit(some, input_type=input_type, counted=reported.extend).result()
    assert reported == wanted


def test_the_limit_leaves_room_for_the_longest_prompt(make_folder: MakeFolder) -> None:
    folder = make_folder()
    with engine_of(folder) as plain:
        longest, (query, document) = plain.max_tokens, plain.count_tokens(["query: ", "a long passage: "])
    assert document > query
    with engine_of(folder, query_prompt="query: ", document_prompt="a long passage: ") as engine:
        assert engine.max_tokens == longest - document
        full = " ".join(["oil"] * engine.max_tokens)
        whole, cut = engine.embed([full, f"{full} pump"])
        np.testing.assert_allclose(whole, cut, atol=1e-6)
        assert not np.allclose(whole, engine.embed([full.removesuffix(" oil")]))
        pieces = engine.split(f"{full} {full}", engine.max_tokens, 0)
        assert engine.count_tokens(pieces) == [engine.max_tokens] * 2


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="leaves no room for texts"):
        EmbeddingEngine(HashingBackend("hash:16", "word " * 254))


def test_the_same_text_as_query_and_document_is_computed_twice(scripted: ScriptedBackend) -> None:
    scripted.info = replace(scripted.info, query_prompt="ask ", document_prompt="tell ")
    with EmbeddingEngine(scripted) as engine:
        queued = engine.submit(["oil", "oil"], "bulk", input_type="query"), engine.submit(["oil"], "bulk")
        assert not np.allclose(queued[0].result()[0], queued[1].result()[0])
    computed = sorted(words for batch in scripted.batches for words in batch)
    assert computed == [["ask", "oil"], ["tell", "oil"]]


def test_an_unknown_input_type_is_refused(engine: EmbeddingEngine) -> None:
    with pytest.raises(ValueError, match='must be "query" or "document", not \'passage\''):
        engine.embed(["oil"], input_type="passage")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------- fingerprint


def test_prompts_are_part_of_the_fingerprint_only_where_there_are_any(
    make_folder: MakeFolder, minilm: EmbeddingEngine
) -> None:
    assert minilm.fingerprint == "all-MiniLM-L6-v2@53aa51172d142c89.be50c362/mean/254/unit/float", "stored collections"
    folder = make_folder()
    given: list[dict[str, Any]] = [
        {},
        {"query_prompt": "a"},
        {"document_prompt": "a"},
        {"query_prompt": "a", "document_prompt": "b"},
    ]
    found = []
    for options in given:
        with engine_of(folder, **options) as engine:
            found.append(engine.fingerprint)
    assert "prompt" not in found[0]
    assert len(set(found)) == len(given)
    with engine_of(write_prompts(folder, {"query": "", "document": ""})) as engine:
        assert engine.fingerprint == found[0]
    with engine_of(write_prompts(folder, {"query": "a", "passage": "b"})) as engine:
        assert engine.fingerprint == found[3], "however the prompts are named"


@pytest.mark.parametrize(("name", "shown"), [("multilingual-e5-small", ""), ("all-MiniLM-L6-v2", "./")])
def test_a_folder_that_has_the_name_of_a_packaged_model_keeps_its_fingerprint(
    make_folder: MakeFolder, name: str, shown: str
) -> None:
    with engine_of(make_folder(name)) as engine:
        assert engine.model == f"./{name}"
        assert engine.fingerprint.startswith(f"{shown}{name}@")
