"""How the reference shows docstrings: where a line begins with an argument or with `Raises`, so does a paragraph. The
last one says where in the source it stands.
"""

import re
from pathlib import Path

import griffe

PARAGRAPHS = re.compile(r"(?<=[.;])\n(?=[a-z]\w*(?:, \w+)*(?: \(.+?\))?: |Raises )")


class Paragraphs(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = PARAGRAPHS.sub("\n\n", obj.docstring.value)
            if obj.is_class or (obj.is_function and obj.parent.is_module):
                file = obj.filepath.relative_to(Path(__file__).parents[1])
                obj.docstring.value += f"\n\nSource: `{file.as_posix()}`, line {obj.lineno}"
