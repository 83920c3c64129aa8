"""Docstrings, comments and messages contain few of the phrases that make prose hard to read."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedshift"
PACKAGES = (
    "aggregation", "analysis", "api", "cli", "config", "console", "core", "data", "diagnosis", "engines",
    "evaluation", "experiments", "export", "flower", "methods", "models", "new_clients", "nn", "report",
    "representations", "reproduce", "results", "tasks", "utils",
)  # fmt: skip
MOST = 2.0
"""Marker phrases per thousand words."""
END = r"(?=[.,;:)]|$)"
MARKERS = {
    "inverted clause": rf"""
        \bha(?:s|ve)\ not\b(?!\ (?:yet\ |even\ )?(?:been|\w+ed|\w+en|run|shown|begun|set|met)\b)
      | (?<!there\ )\b(?:is|are|was|were|be)\ no\b(?!\ (?:longer|more|less|fewer|larger|smaller|lower|higher|better))
      | \b(?:of|at|by|from|to|along|beside)\ which\b | \bof\ whose\b | \bin\ place\ of\ which\b | \bwhat\ becomes\ of\b
      | \bback\ to\ where\b | 's\ are{END}
    """,
    "participle or possessive as a noun": rf"""
        \bwhat\ (?:is|was|were|are|they\ are)\ (?:given|found|said|made|told|met|kept|typed|received)\b
      | \b(?:the|those|as|what|than|is|was)\ given{END} | \bas\ (?:it|they)\ (?:is|are|was|were|stand|stands)\b
      | \b(?:'s|its|their|his|our)\ own(?=[,;:.)]|\ (?:are|is|in|and|or|of|beside)\b|$)
      | (?<=\w)'s\ own(?=[,;:.)]|\ (?:are|is|in|and|or|of|beside)\b|$) | \bof\ (?:yours|the\ user's)\b
      | \b(?:those|that)\ (?:of|by|to|for|in|on|under|with|without)\b | \bas\ one\ of\ (?:this|these|the)\b
    """,
    "figurative verb": rf"""
        \b(?:tells?|told|telling)\ (?:\w+\ ){{0,3}}apart\b | \bmend(?:s|ed|ing)?\b | \bapart\b
      | \b(?:hand|hands|handed|handing)\ (?:\w+\ )?(?:out|over|back)\b | \blooks\b | \blook\ (?:of|like|alike)\b
      | \bstand(?:s|ing)?\ (?:out|for|alone|in|at|there)\b | \blets?\ go\b | \bgiv(?:e|es|en|ing)\ back\b
      | \b(?:is|are|was|were|as)\ met\b | \btak(?:e|es|en|ing)\ (?:away|over|part\ of|the\ place)\b
      | \bma(?:ke|kes|de|king)\ of\b | \bmake\ \w+(?:\ \w+)?\ another\b | \b(?:says|said|tells|told|speaks)\b
      | \bcomes?\ (?:to|first|last|next|of)\b | \bbrings\b | \blies\b
      | \b(?:is|are)\ (?:left|there|gone|alike|whole){END}
    """,
    "article for per": r"""
        \b(?:batch|batche|step|sample|value|score|vector|number|class|weight|byte|line|model)s?
        \ an?\ (?:pass|round|batch|channel|sample|step|client|image|patient|seed|value|lane|layer|line)\b
    """,
    "worn adverb": rf"""
        \b(?:but|save)\ for\b | \bfor\ ever\b | \banew\b | \bbeside\b | \bafresh\b | \bnothing\ but\b | \balone{END}
      | \bwhatever\b | \bby\ now\b | \bat\ all{END} | \bare\ others\b
    """,
}
MARKER = re.compile("|".join(f"(?:{pattern})" for pattern in MARKERS.values()), re.VERBOSE | re.IGNORECASE)
AWKWARD = (
    "the server would hand out its first value for ever",
    "Factors of the layer make no model another one.",
    "A job that has taken no steps but those apart",
    "Return an optimizer of torch as one of this module",
    "T batches a pass",
    "Put the parameters back to where they may be",
    "takes over the one client whose upload is nearest",
    "a personal head adds what the client's own are",
    "images in the look of others",
    "the mean feature of its samples, as met in its last pass",
    "the dot behind them, which the network itself has not",
    "the factors of which they are products",
    "parameters of whose updates half are held",
    "without those that give back what they are given",
    "settings that are not what a table's are",
    "mend or remove the file",
    "not told apart from fedavg",
)
PLAIN = (
    "the server would always broadcast the initial value",
    "Restart the model from the result of the separate phases.",
    "Convert a torch optimizer.",
    "the features as seen in the last epoch",
    "which the model lacks",
    "not significantly different from fedavg",
)


COMMENT = re.compile(r"(?:^ *|  )# (?!type: ignore|fmt:|noqa)(.+)", re.MULTILINE)


def collect_prose(source):
    """Yield the docstrings, strings with spaces and comments of a module, each in one line."""
    nodes = list(ast.walk(ast.parse(source)))
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in joined:
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    for node in nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
            and " " in node.value
        ):
            yield node.value
    yield from COMMENT.findall(source)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_phrases_are_markers(text):
    assert MARKER.search(text)


@pytest.mark.parametrize("text", PLAIN)
def test_plain_phrases_are_not(text):
    assert not MARKER.search(text)


@pytest.mark.parametrize("package", PACKAGES)
def test_marker_phrases_are_rare(package):
    words, markers = 0, []
    for path in sorted((SOURCE / package).rglob("*.py")):
        for text in map(" ".join, map(str.split, collect_prose(path.read_text()))):
            words += len(text.split())
            markers += [f"{path.name}: {text[max(0, m.start() - 60) : m.end() + 30]}" for m in MARKER.finditer(text)]
    assert 1000 * len(markers) < MOST * words, "\n".join([f"{len(markers)} in {words} words", *markers])
