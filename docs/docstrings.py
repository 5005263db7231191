"""How the reference shows docstrings: where a line begins with an argument or with `Raises`, so does a paragraph; a
star is a star, as in beta*. The last line says where in the source it stands.
"""

import re
from pathlib import Path

import griffe

PARAGRAPHS = re.compile(r"(?<=[.;])\n(?=[a-z]\w*(?:, \w+)*(?: \(.+?\))?: |Raises )")


STAR = re.compile(r"^(?! {4}).*\*.*$", re.MULTILINE)  # not in formulas, which are set off by four spaces


class Paragraphs(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            plain = STAR.sub(lambda line: line[0].replace("*", r"\*"), obj.docstring.value)
            obj.docstring.value = PARAGRAPHS.sub("\n\n", plain)
            if obj.is_class or (obj.is_function and obj.parent.is_module):
                file = obj.filepath.relative_to(Path(__file__).parents[1])
                obj.docstring.value += f"\n\nSource: `{file.as_posix()}`, line {obj.lineno}"
