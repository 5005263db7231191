"""FEM in engines that bring an attention and a cache of their own: what they are told of a model."""
