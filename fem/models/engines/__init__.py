"""FEM in engines that bring an attention and a cache of their own: transformers' attention interface, and vLLM."""
