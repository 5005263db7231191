"""A look inside a language model: what every channel of every head reads from a text.

layers.py computes the tables, page.py makes one HTML page of them, experiment.py is `fem inspect`.
"""

MOST_TOKENS = 64  # of the text
