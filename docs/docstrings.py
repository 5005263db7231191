"""How the reference shows docstrings: where a line begins with an argument or with `Raises`, so does a paragraph."""

import re

import griffe

PARAGRAPHS = re.compile(r"(?<=[.;])\n(?=[a-z]\w*(?:, \w+)*(?: \(.+?\))?: |Raises )")


class Paragraphs(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = PARAGRAPHS.sub("\n\n", obj.docstring.value)
