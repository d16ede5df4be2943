"""For mkdocstrings: what docstrings show as literal blocks (`::`) and as doctests, the pages show as code."""

import re
from typing import Any

import griffe

_LITERAL = re.compile(r"(?m)^(?P<before>.*?)::\n\n(?P<code>(?:(?: {4}.*)?\n)+)")
_DOCTEST = re.compile(r"(?m)^>>> .*(?:\n(?!$).*)*(?:\n\n>>> .*(?:\n(?!$).*)*)*")
_RETURNS = re.compile(r"(?m)^(Returns:\n +)(?=\S)")


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Writes the type before what is returned, where the first colon of a sentence would end the type."""
        if func.docstring and func.returns is not None:
            func.docstring.value = _RETURNS.sub(rf"\g<1>{func.returns}: ", func.docstring.value)


def as_markdown(text: str) -> str:
    text = _LITERAL.sub(_fenced, text + "\n")
    return _DOCTEST.sub(lambda found: f"\n```pycon\n{found[0]}\n```\n", text).rstrip()


def _fenced(found: re.Match[str]) -> str:
    code = "\n".join(line[4:] for line in found["code"].rstrip().splitlines())
    before = f"{found['before']}:" if found["before"].strip() else ""
    return f"{before}\n\n```text\n{code}\n```\n\n"
